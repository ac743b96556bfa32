"""Documents, whatever their content: what is dumped is read back equal."""

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from horovod_trainer.documents import Document, apply_overrides, digest, dump_yaml, load_yaml, merge

no_deadline = settings(deadline=None)  # a busy machine is no failure

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | text
    | st.sampled_from(
        ["1e-3", "0o17", "yes", "NO", "22:22", "~", "", "2020-01-01", "<<", "=", "012", ".5", "1_0", "- x"]
    )
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=12
)
mappings = st.dictionaries(text, values, max_size=5)


def read_back(content: str) -> Document:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.yaml"
        file.write_bytes(content.encode())
        return load_yaml(file)


@no_deadline
@given(mappings)
@example({"\ufeff": "\ufeff", "a": "\x85\u2028\x7f", "b": " x ", "c": "a\n\nb\n"})
def test_yaml_is_read_back_equal_value_and_type(data: dict[str, Any]) -> None:
    got = read_back(dump_yaml(data)).data
    assert got == data
    assert repr(got) == repr(data)


@no_deadline
@given(mappings)
def test_json_is_read_as_yaml(data: dict[str, Any]) -> None:
    finite = json.dumps(data).replace("Infinity", "1")
    assert read_back(finite).data == json.loads(finite)


@no_deadline
@given(mappings)
def test_the_digest_is_that_of_the_content_not_its_order(data: dict[str, Any]) -> None:
    finite = json.loads(json.dumps(data).replace("Infinity", "1"))
    assert digest(finite) == digest(dict(reversed(finite.items())))


@no_deadline
@given(mappings, mappings)
def test_merging_the_same_twice_changes_nothing(a: dict[str, Any], b: dict[str, Any]) -> None:
    once = merge(Document(a, {}), Document(b, {}))
    assert merge(once, Document(b, {})) == once
    assert set(once.data) == set(a) | set(b)


@no_deadline
@given(st.lists(st.from_regex(r"[a-z]{1,5}", fullmatch=True), min_size=1, max_size=4), st.integers() | st.booleans())
def test_an_override_lands_at_its_path(parts: list[str], value: int) -> None:
    path = ".".join(parts)
    document = apply_overrides(Document({}, {}), [f"{path}={json.dumps(value)}"])
    node: Any = document.data
    for part in parts:
        node = node[part]
    assert node == value
    assert document.where(path) == f"-s {path}={json.dumps(value)}"
