"""The command line: data on stdout, prose and progress on stderr, one exit code per kind of error."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from horovod_trainer.allocator import restart_tuned
from horovod_trainer.errors import CommunicationFailed, ExitCode, InvalidInput, NotFound, Problem, TrainerError

if TYPE_CHECKING:
    from horovod_trainer.comm.base import Communicator
    from horovod_trainer.config import Config

COPY_SECONDS = "3600"  # for the slowest node's copy

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _repeated(*names: str, metavar: str, help: str) -> Any:
    """Return an option that may be given any number of times, none included."""
    return typer.Option(*names, metavar=metavar, help=help, default_factory=list, show_default=False)


ConfigFiles = Annotated[
    list[Path], _repeated("--config", "-c", metavar="FILE", help="YAML; repeat it: later files win over earlier ones.")
]
Overrides = Annotated[
    list[str], _repeated("--set", "-s", metavar="KEY=VALUE", help="section.key=value; repeat it: wins over files.")
]
Output = Annotated[str, typer.Option("--output", "-o", metavar="FORM", help="text or json.")]

SplitName = Literal["valid", "test"]

FIRST_ERROR_SECONDS = 1.0  # a rank that fails because another did lets the other speak first


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    """Train a GraphSAGE link predictor, data-parallel with Horovod."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(ExitCode.INVALID)


@app.command()
def prepare(config: ConfigFiles, override: Overrides, output: Output = "text") -> None:
    """Turn the configured source into a verified store. Does nothing when it is there already."""
    want_output(output)
    from horovod_trainer import console
    from horovod_trainer.config import load_config
    from horovod_trainer.data.prepare import prepare_store
    from horovod_trainer.data.store import read_manifest

    console.setup_logging()
    path = prepare_store(load_config(config, override).data, console.stage_progress)
    manifest = read_manifest(path)
    for sentence in manifest["warnings"]:
        console.get_logger().warning("%s", sentence)
    document = {key: manifest[key] for key in ("name", "counts", "cleanup", "checks", "warnings", "digest")}
    show(output, f"{manifest['name']} at {path}", manifest["counts"], {"store": str(path)} | document)


@app.command()
def verify(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder that `prepare` made.")], output: Output = "text"
) -> None:
    """Recompute every digest of a store and name what is damaged."""
    want_output(output)
    from horovod_trainer import console
    from horovod_trainer.data.store import open_store, verify_store

    console.setup_logging()
    problems = verify_store(store, console.stage_progress)
    if problems:
        raise InvalidInput(problems)
    files = {"files": len(open_store(store).manifest["arrays"])}
    show(output, f"{store}: every file is what prepare wrote", files, {"ok": True} | files)


@app.command()
def train(
    config: ConfigFiles,
    override: Overrides,
    max_hours: Annotated[
        float | None, typer.Option(metavar="HOURS", help="Stop after this long: short for train.max_hours.")
    ] = None,
    output: Output = "text",
) -> None:
    """Train on a prepared store. Under horovodrun or mpirun: on all its ranks."""
    want_output(output)
    from horovod_trainer import console
    from horovod_trainer.comm.backends import open_communicator
    from horovod_trainer.config import load_config
    from horovod_trainer.data import staging

    override = override if max_hours is None else [*override, f"train.max_hours={max_hours}"]
    settings = load_config(config, override)
    console.setup_logging(launcher_rank())
    # before Horovod starts: what is missing is said at once, and nobody waits in a collective for a copy
    lease = staging.acquire(settings.data, console.stage_progress)
    allow_for_copies(settings)
    comm = open_communicator(settings.train.communicator)
    threads = set_threads(settings, comm)
    from horovod_trainer.run import Run
    from horovod_trainer.train import Trainer

    trainer = Trainer(
        settings, lease.store, comm, threads
    )  # refuses what cannot run, before an earlier run is moved aside
    run = Run.start(Path(settings.output.dir), comm, settings)
    result = trainer.run(run.telemetry)
    if comm.rank == 0:
        plot = run.finish(trainer.model, result)
        rows = {f"{split} {name}": value for split in ("valid", "test") for name, value in result[split].items()}
        shown = {"best epoch": result["best_epoch"], "steps": result["steps"], "seconds": round(result["seconds"], 1)}
        title = f"{result['data']['name']}, {console.counted(comm.size, 'rank')}, validation edges at test time: " + (
            "in the graph" if settings.evaluate.use_valid_edges else "not in the graph"
        )
        show(output, title, rows | shown, result, f"ended: {result['ended']}", closing(result, plot))
    comm.close()


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of an earlier `train`.")],
    override: Overrides,
    split: Annotated[SplitName, typer.Option(metavar="SPLIT", help="valid or test.")] = "test",
    output: Output = "text",
) -> None:
    """Score a split with the weights of a run. Every query, full graph; on several ranks when launched so."""
    want_output(output)
    from horovod_trainer import console
    from horovod_trainer.assemble import build_evaluator, check_store
    from horovod_trainer.comm.backends import open_communicator
    from horovod_trainer.data import staging
    from horovod_trainer.run import load_model, load_run_config
    from horovod_trainer.train import pick_device

    console.setup_logging(launcher_rank())
    settings = load_run_config(run, override)
    lease = staging.acquire(settings.data, console.stage_progress)  # held to the end: what is in use is not removed
    store = lease.store
    check_store(settings, store)
    allow_for_copies(settings)
    comm = open_communicator(settings.train.communicator)
    evaluator = build_evaluator(settings, store, comm, set_threads(settings, comm), split)
    model = load_model(run, settings, evaluator.features.width).to(pick_device(settings.train.device, comm.local_rank))
    result = evaluator.run(model, store.held_out(split), progress=console.stage_progress)
    if comm.rank == 0:
        edges = "in" if settings.evaluate.use_valid_edges else "not in"
        show(output, f"{run}, {split}; validation edges {edges} the test graph", result, {"split": split} | result)
    comm.close()


@app.command("config")
def show_config(config: ConfigFiles, override: Overrides, output: Output = "text") -> None:
    """Print the configuration as it will be used. Defaults, then files, then overrides, validated."""
    want_output(output)
    import json

    from horovod_trainer.config import load_config
    from horovod_trainer.documents import dump_yaml

    data = load_config(config, override).model_dump(mode="json")
    typer.echo(json.dumps(data, indent=2) if output == "json" else dump_yaml(data).rstrip())


@app.command()
def check(output: Output = "text") -> None:
    """Show what this machine and build can do. Each fact is ok, or comes with its fix."""
    want_output(output)
    from dataclasses import asdict

    from horovod_trainer import console
    from horovod_trainer.environment import collect_facts

    facts = collect_facts()
    ready = all(fact.ok or not fact.required for fact in facts)
    if output == "json":
        print_json({"ok": ready, "checks": [asdict(fact) for fact in facts]})
    else:
        rows = [(fact.name, fact.value, "ok" if fact.ok else "NOT OK", fact.fix or "") for fact in facts]
        console.table("This machine and build", ["fact", "value", "", "fix"], rows)
    if not ready:
        raise typer.Exit(ExitCode.FAILED)


def launcher_rank() -> int:
    """Return this process's rank as its launcher says; 0 outside one."""
    names = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), 0)


def allow_for_copies(settings: Config) -> None:
    """Let Horovod's start wait for nodes that are still copying the store; the user's own limit wins.

    Gloo's default of 30 s ends a job whose nodes do not all have their copy yet.
    """
    if settings.data.stage is not None:
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", COPY_SECONDS)


def set_threads(settings: Config, comm: Communicator) -> int:
    """Give this rank its share of the cores it may use, in torch, OpenMP and numba alike; return it."""
    import torch

    from horovod_trainer.jit import set_threads as set_kernel_threads
    from horovod_trainer.world import threads_per_rank

    share = threads_per_rank(comm)
    threads = settings.train.threads or share
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    set_kernel_threads(threads)
    return threads


def want_output(output: str) -> None:
    """Raise InvalidInput unless `output` is one of the two forms."""
    if output not in ("text", "json"):
        raise InvalidInput(Problem("--output", "is text or json", output))


def print_json(document: Any) -> None:
    """Print one JSON document."""
    import json

    typer.echo(json.dumps(document, indent=2, sort_keys=True))


def show(output: str, title: str, rows: dict[str, Any], document: dict[str, Any], *closing_lines: str) -> None:
    """Print rows as a table with closing lines below it, or as one JSON document."""
    if output == "json":
        print_json(document)
        return
    from horovod_trainer import console

    typer.echo(title)
    console.table("", ["", ""], [(name, _readable(value)) for name, value in rows.items()])
    for line in closing_lines:
        typer.echo(line)


def _readable(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def closing(result: dict[str, Any], plot: Path) -> str:
    """Return the last line of a training run: the test figure and where the curves are."""
    name, value = next((key, value) for key, value in result["test"].items() if key in ("mrr", "auc"))
    return f"test {name.upper()} {value:.4f}   curves: {plot}"


def entry() -> None:
    """Run the command line in a process of its own: commands that compute restart it with the allocator's settings."""
    if sys.argv[1:2] in (["train"], ["eval"]):
        restart_tuned()
    main()


def main() -> None:
    """Run the command line; every error ends as one line each and its exit code; a traceback means a bug of ours."""
    try:
        code = app(standalone_mode=False)
        leave(code if isinstance(code, int) else ExitCode.OK)
    except typer.TyperException as failure:  # what was typed
        message = " ".join(failure.format_message().split())
        report(InvalidInput(f"{message.rstrip('.')} (see --help)"))
        leave(ExitCode.INVALID)
    except (KeyboardInterrupt, typer.Abort):
        leave(ExitCode.INTERRUPTED)
    except TrainerError as failure:
        report(failure)
        leave(failure.exit_code)
    except BrokenPipeError:  # the reader has left and wants to hear no more
        leave(ExitCode.FAILED)
    except OSError as failure:
        kind = NotFound if isinstance(failure, FileNotFoundError) else TrainerError
        error = kind(Problem(str(failure.filename or "input or output"), failure.strerror or str(failure)))
        report(error)
        leave(error.exit_code)
    except Exception as failure:
        if ran_out_of_memory(failure):
            report(TrainerError(f"out of memory: {' '.join(str(failure).split())}"))
        else:
            traceback.print_exc()  # and leave at once, so that the other ranks do not wait for this one
        leave(ExitCode.FAILED)


def ran_out_of_memory(failure: Exception) -> bool:
    """Return whether this is numpy's, the CPU allocator's or CUDA's way to say so; torch raises RuntimeErrors."""
    return isinstance(failure, MemoryError) or (
        isinstance(failure, RuntimeError)
        and any(sign in str(failure) for sign in ("not enough memory", "can't allocate memory", "out of memory"))
    )


def report(error: TrainerError) -> None:
    """Print an error's problems, one line each; one that all ranks share is printed by rank 0 alone."""
    from horovod_trainer import console

    if error.agreed and launcher_rank() != 0:
        return
    if isinstance(error, CommunicationFailed):
        time.sleep(FIRST_ERROR_SECONDS)
    console.print_error(error)


def leave(code: int) -> NoReturn:
    """End the process; under a launcher at once, so that a failed rank takes the job down instead of waiting for it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed by the caller
            continue
        try:
            stream.flush()
        except OSError as failure:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # where what it still holds can go
            if code == ExitCode.OK and not isinstance(failure, BrokenPipeError):
                report(TrainerError(Problem(stream.name, failure.strerror or str(failure))))
            code = code or ExitCode.FAILED
    if code != ExitCode.OK and any(name in os.environ for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")):
        os._exit(code)
    sys.exit(code)
