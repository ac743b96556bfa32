"""Configuration: defaults, layering, and how every mistake reads (path, fix, value got, file and line)."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from horovod_trainer.config import Config, load_config, parse_config
from horovod_trainer.documents import Document, dump_yaml
from horovod_trainer.errors import InvalidInput, NotFound


def refusal(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    """Return the lines a user would read, file names without their folder."""
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        load_config([file], overrides)
    return [str(problem).replace(str(tmp_path) + "/", "") for problem in caught.value.problems]


def test_no_file_at_all_is_a_valid_run() -> None:
    assert load_config([]) == Config()


def test_defaults_then_files_in_order_then_overrides(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train: {epochs: 5, seed: 1}\nmodel:\n  hidden: 32\n")
    (tmp_path / "b.yaml").write_text("train: {epochs: 6}\n")
    config = load_config([tmp_path / "a.yaml", tmp_path / "b.yaml"], ["train.seed=7", "optim.lr=1e-3"])
    assert (config.train.epochs, config.train.seed, config.model.hidden) == (6, 7, 32)
    assert config.optim.lr == 0.001
    assert config.model.layers == Config().model.layers


def test_the_printed_configuration_is_the_configuration(tmp_path: Path) -> None:
    config = load_config([], ["sampling.fanouts=[-1, 5]", "evaluate.hits_pooled=[50]", "optim.lr=1e-5", "data.path=on"])
    (tmp_path / "run.yaml").write_text(dump_yaml(config.model_dump(mode="json")))
    assert load_config([tmp_path / "run.yaml"]) == config


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().train.epochs = 3  # type: ignore[misc]  # the mistake under test


def test_an_unknown_key_gets_the_nearest_name(tmp_path: Path) -> None:
    assert refusal(tmp_path, "model:\n  layers: 2\n  hiden: 64\n") == [
        "model.hiden: unknown key; did you mean hidden? (got 64) [run.yaml:3]"
    ]
    assert refusal(tmp_path, "tra1n:\n  epochs: 2\n") == [
        "tra1n: unknown key; did you mean train? (got {'epochs': 2}) [run.yaml:1]"
    ]
    assert "did you mean nodes?" in refusal(tmp_path, "data:\n  synthetic:\n    node: 3\n")[0]


def test_an_unknown_key_near_nothing_gets_all_names(tmp_path: Path) -> None:
    assert refusal(tmp_path, "negatives:\n  zzzzzz: 1\n") == [
        "negatives.zzzzzz: unknown key; known here: count, kind (got 1) [run.yaml:2]"
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {epochs: many}", "train.epochs: Input should be a valid integer (got many)"),
        ("train: {epochs: '3'}", "train.epochs: Input should be a valid integer (got '3')"),
        ("train: {epochs: 3.0}", "train.epochs: Input should be a valid integer (got 3.0)"),
        ("train: {epochs: true}", "train.epochs: Input should be a valid integer (got True)"),
        ("train: {epochs: 0}", "train.epochs: Input should be greater than or equal to 1 (got 0)"),
        ("output: {tensorboard: yes}", "output.tensorboard: Input should be a valid boolean (got yes)"),
        ("optim: {lr: .nan}", "optim.lr: Input should be a finite number (got nan)"),
        ("optim: {lr: }", "optim.lr: Input should be a valid number (got null)"),
        ("model: {aggregator: avg}", "model.aggregator: Input should be 'mean', 'sum' or 'max' (got avg)"),
        ("model: 3", "model: is a section: `key: value` lines, indented under it (got 3)"),
        ("model:", "model: is a section: `key: value` lines, indented under it (got null)"),
        ("sampling: {fanouts: 5}", "sampling.fanouts: Input should be a list (got 5)"),
        ("sampling: {fanouts: [5, x]}", "sampling.fanouts.1: Input should be a valid integer (got x)"),
        (
            "sampling: {fanouts: [5, 0]}",
            "sampling.fanouts: every fan-out is at least 1, or -1 for all neighbours (got [5, 0])",
        ),
    ],
)
def test_a_wrong_value_says_what_is_right_and_where_it_is(tmp_path: Path, text: str, line: str) -> None:
    assert refusal(tmp_path, f"# a comment\n{text}\n") == [f"{line} [run.yaml:2]"]


def test_a_whole_number_is_a_fraction_too() -> None:
    assert load_config([], ["optim.lr=1"]).optim.lr == 1.0


def test_several_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    text = "model:\n  hiden: 64\n  layers: two\noptim:\n  clip_norm: -1\ntrain:\n  epochs: 0\n"
    lines = refusal(tmp_path, text, "data.source=web")
    assert sorted(line.split(":")[0] for line in lines) == [
        "data.source", "model.hiden", "model.layers", "optim.clip_norm", "train.epochs",
    ]  # fmt: skip
    assert all(line.endswith("]") for line in lines)
    assert next(line for line in lines if "data.source" in line).endswith("[-s data.source=web]")


@pytest.mark.parametrize(
    ("text", "path", "part"),
    [
        ("sampling: {fanouts: [5]}", "sampling.fanouts", "each of the 2 layers"),
        ("data: {valid_fraction: 0.5, test_fraction: 0.5}", "data.test_fraction", "at least 10 %"),
        ("data: {source: ogb}", "data.path", "needs the folder"),
        ("data: {source: npz}", "data.path", "needs the folder"),
        ("negatives: {kind: shared, count: 1}", "negatives.count", "at least 2"),
        ("model: {input: constant, input_dropout: 0.5}", "model.input_dropout", "nothing to drop"),
    ],
)
def test_fields_that_contradict_each_other(tmp_path: Path, text: str, path: str, part: str) -> None:
    (line,) = refusal(tmp_path, text)
    assert line.startswith(f"{path}: ")
    assert part in line
    assert line.endswith("[run.yaml:1]")


def test_contradictions_are_reported_together(tmp_path: Path) -> None:
    lines = refusal(tmp_path, "model: {layers: 3}\nnegatives: {kind: shared}\ndata: {source: ogb}\n")
    assert [line.split(":")[0] for line in lines] == ["sampling.fanouts", "data.path", "negatives.count"]
    assert [line[-12:] for line in lines] == ["[run.yaml:1]", "[run.yaml:3]", "[run.yaml:2]"]


def test_an_override_is_named_as_the_place_of_its_mistake(tmp_path: Path) -> None:
    assert refusal(tmp_path, "train: {epochs: 5}", "train.epochs=no") == [
        "train.epochs: Input should be a valid integer (got no) [-s train.epochs=no]"
    ]


def test_the_later_of_two_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("train:\n  epochs: 0\n")
    (tmp_path / "top.yaml").write_text("\n\ntrain:\n  epochs: -1\n")
    with pytest.raises(InvalidInput) as caught:
        load_config([tmp_path / "base.yaml", tmp_path / "top.yaml"])
    assert caught.value.problems[0].source == f"{tmp_path}/top.yaml:4"


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        load_config([tmp_path / "none.yaml"])


def test_a_document_without_lines_is_validated_too() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_config(Document({"train": {"epochs": 0}}, {}))
    assert caught.value.problems[0].source is None
