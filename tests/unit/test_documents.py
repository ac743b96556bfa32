"""Documents: what the strict loader reads and refuses, overrides, dumps, and files that appear whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from horovod_trainer import documents
from horovod_trainer.documents import (
    Document,
    apply_overrides,
    digest,
    dump_canonical,
    load_yaml,
    merge,
    write_atomic,
)
from horovod_trainer.errors import InvalidInput, NotFound


def load(tmp_path: Path, text: str | bytes) -> Document:
    file = tmp_path / "a.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_yaml(file)


def refusal(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(InvalidInput) as caught:
        load(tmp_path, text)
    return str(caught.value).replace(str(tmp_path) + "/", "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("012", 12),
        ("0x1F", 31),
        ("0o17", 15),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("true", True),
        ("FALSE", False),
        ("22:22", "22:22"),
        ("2020-01-01", "2020-01-01"),
        ("1_000", "1_000"),
        ("<<", "<<"),
        ("=", "="),
        ("null", None),
        ("", None),
        ("'1'", "1"),
        ("é 漢 😀", "é 漢 😀"),
        (r'"\ud83d\ude00"', "😀"),
        ("[1, [a, {b: 2}]]", [1, ["a", {"b": 2}]]),
    ],
)
def test_a_value_is_what_it_looks_like(tmp_path: Path, text: str, value: object) -> None:
    got = load(tmp_path, f"key: {text}\n").data["key"]
    assert got == value
    assert type(got) is type(value)


def test_keys_that_yaml_1_1_takes_for_booleans_stay_text(tmp_path: Path) -> None:
    assert load(tmp_path, "on: 1\nno: 2\ny: 3\n").data == {"on": 1, "no": 2, "y": 3}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_file_is_an_empty_document(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text) == Document({}, {})


def test_json_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    assert load(tmp_path, b'\xef\xbb\xbf{"a": {"b": [1, true, null]}}').data == {"a": {"b": [1, True, None]}}


def test_where_names_the_line_or_the_nearest_section(tmp_path: Path) -> None:
    document = load(tmp_path, "a:\n  b: 1\n  c:\n    - x\n    - y\n")
    file = tmp_path / "a.yaml"
    assert document.where("a.b") == f"{file}:2"
    assert document.where("a.c.1") == f"{file}:5"
    assert document.where("a.missing") == f"{file}:1"
    assert document.where("other") is None


def test_every_duplicate_key_is_named_with_both_lines(tmp_path: Path) -> None:
    assert refusal(tmp_path, "a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\na: 2\n").splitlines() == [
        "b.c: key given twice, on lines 3 and 5 [a.yaml:5]",
        "a: key given twice, on lines 1 and 6 [a.yaml:6]",
    ]


@pytest.mark.parametrize(
    ("text", "part", "line"),
    [
        ("a: 1\n- 1\n", "not valid YAML", 2),
        ("a: [1\n", "not valid YAML", 2),
        ("a: 1\n---\nb: 1\n", "single document", 2),
        ("- 1\n", "top level", 1),
        ("just text\n", "top level", 1),
        ("null\n", "top level", 1),
        ("a: 1\n2: b\n", "a key must be text", 2),
        ("a: 1\n[x]: b\n", "a key must be text", 2),
        ("a: 1\nb: !!python/object/apply:os.system [ls]\n", "tags are not allowed", 2),
        ("a: !!binary aGk=\n", "tags are not allowed", 1),
        ("a: 1\nb: *nowhere\n", "undefined alias", 2),
        ("a: 1\nb: \x01\n", "does not allow", 2),
        (b"a: 1\nb: \xff\n", "not UTF-8", 2),
        ('a: "\\ud83d"\n', "half a character", 1),
        ("a: " + "9" * 5000, "thousands of digits", 1),
        ("a: " + "[" * 1000, "nested deeper", 1),
        ("a: &a [*a]\n", "aliases", 1),
    ],
)
def test_what_is_refused_is_named_with_its_line(tmp_path: Path, text: str | bytes, part: str, line: int) -> None:
    message = refusal(tmp_path, text)
    assert part in message
    assert message.endswith(f"[a.yaml:{line}]")


def test_an_alias_is_read_but_a_bomb_of_them_is_refused(tmp_path: Path) -> None:
    assert load(tmp_path, "a: &x [1, 2]\nb: *x\n").data == {"a": [1, 2], "b": [1, 2]}
    bomb = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    assert "aliases" in refusal(tmp_path, bomb)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"missing\.yaml: no such file"):
        load_yaml(tmp_path / "missing.yaml")
    with pytest.raises(InvalidInput, match="Is a directory"):
        load_yaml(tmp_path)
    assert "larger than" in refusal(tmp_path, "#" * (documents.MAX_BYTES + 1))


def test_merge_goes_into_sections_and_keeps_the_right_lines() -> None:
    a = Document(
        {"s": {"x": 1, "y": [1, 2]}, "t": 1}, {"s": "a:1", "s.x": "a:2", "s.y": "a:3", "s.y.1": "a:3", "t": "a:4"}
    )
    b = Document({"s": {"y": [3]}, "u": {"z": 1}}, {"s": "b:1", "s.y": "b:2", "s.y.0": "b:2", "u": "b:3", "u.z": "b:4"})
    merged = merge(a, b)
    assert merged.data == {"s": {"x": 1, "y": [3]}, "t": 1, "u": {"z": 1}}
    places = {path: merged.where(path) for path in ("s", "s.x", "s.y", "s.y.1", "s.y.0", "u.z", "u.q")}
    assert places == {
        "s": "a:1", "s.x": "a:2", "s.y": "b:2", "s.y.1": "b:2", "s.y.0": "b:2", "u.z": "b:4", "u.q": "b:3",
    }  # fmt: skip
    assert a.data["s"] == {"x": 1, "y": [1, 2]}


def test_overrides_are_yaml_values_and_their_own_place() -> None:
    document = Document({"train": {"epochs": 1}, "model": None}, {"train": "a:1", "train.epochs": "a:2"})
    got = apply_overrides(
        document, ["train.epochs=3", "optim.lr=1e-3", "f=[1, -1]", "train.max=", "model={layers: 3}", "p=a=b", "q=no"]
    )
    assert got.data == {
        "train": {"epochs": 3, "max": None}, "optim": {"lr": 0.001}, "f": [1, -1], "model": {"layers": 3},
        "p": "a=b", "q": "no",
    }  # fmt: skip
    assert got.where("train.epochs") == "-s train.epochs=3"
    assert got.where("train.other") == "a:1"
    assert got.where("optim.other") == "-s optim.lr=1e-3"
    assert got.where("model.layers") == "-s model={layers: 3}"


def test_the_last_override_wins() -> None:
    assert apply_overrides(Document({}, {}), ["a.b=1", "a.b=2"]).data == {"a": {"b": 2}}


def test_every_bad_override_is_named_at_once() -> None:
    with pytest.raises(InvalidInput) as caught:
        apply_overrides(Document({}, {}), ["epochs", "=3", "a..b=1", "c=[1", "d={x: 1, x: 2}", "e=!!int 3", "ok=1"])
    assert [problem.path for problem in caught.value.problems] == ["-s", "-s", "-s", "c", "d.x", "e"]
    assert caught.value.problems[3].source == "-s c=[1"


def test_equal_data_has_one_canonical_text_and_digest() -> None:
    assert dump_canonical({"b": [1, None], "a": "é"}) == '{"a":"é","b":[1,null]}'
    assert digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
    assert digest({"a": 1}) != digest({"a": "1"})
    assert len(digest({})) == 64
    with pytest.raises(ValueError, match="JSON"):
        dump_canonical({"a": float("nan")})


def test_write_atomic_makes_the_folder_replaces_and_leaves_no_litter(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file.txt"
    write_atomic(target, "one é")
    write_atomic(target, b"two")
    assert target.read_bytes() == b"two"
    assert [path.name for path in target.parent.iterdir()] == ["file.txt"]


def test_write_atomic_obeys_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "file", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    write_atomic(target, "old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
