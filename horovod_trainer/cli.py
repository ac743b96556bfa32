"""The command line: data on stdout, prose and progress on stderr, one exit code per kind of error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from horovod_trainer.allocator import restart_tuned
from horovod_trainer.ending import end_with, farewell, leave
from horovod_trainer.errors import ExitCode, InvalidInput, Problem
from horovod_trainer.launchers import launcher_local_rank, launcher_rank
from horovod_trainer.stopping import StopWish
from horovod_trainer.watchdog import Watchdog

if TYPE_CHECKING:
    from horovod_trainer.comm.base import Communicator
    from horovod_trainer.config import Config
    from horovod_trainer.data.staging import Lease

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
    resume: Annotated[
        str, typer.Option(metavar="auto|never|DIR", help="Go on in output.dir, train anew, or go on from a folder.")
    ] = "auto",
    output: Output = "text",
) -> None:
    """Train on a prepared store. Under horovodrun or mpirun: on all its ranks. Goes on where it was interrupted."""
    want_output(output)
    hours = [] if max_hours is None else [f"train.max_hours={max_hours}"]
    with StopWish() as stop:
        run_training(config, [*override, *hours], resume, output, stop)


def run_training(config: list[Path], override: list[str], resume: str, output: str, stop: StopWish) -> None:
    """Open the store and the world, then train from the start or from a checkpoint, and show the result."""
    from horovod_trainer import console
    from horovod_trainer.config import load_config

    settings = load_config(config, override)
    console.setup_logging(launcher_rank())
    with world(settings) as (lease, comm, threads, watchdog):
        from horovod_trainer.assemble import check_store
        from horovod_trainer.resume import begin, say_changes
        from horovod_trainer.run import Run
        from horovod_trainer.train import Trainer
        from horovod_trainer.world import check_placement

        check_placement(comm, settings.launch)
        check_store(settings, lease.store)
        start = begin(comm, settings, lease.store.manifest["digest"], resume)
        if start.result is not None:
            if comm.rank == 0:
                console.get_logger().info("%s is finished already; --resume never trains it again", settings.output.dir)
                show_result(output, settings, start.result)
            return
        # refuses what cannot run, before an earlier run is moved aside
        trainer = Trainer(start.config, lease.store, comm, threads, stop, watchdog)
        if start.recorded is not None:
            trainer.restore(start.recorded.progress, start.tensors)
        with watchdog.suspended():  # another host's lock may be waited for
            run = Run.start(Path(settings.output.dir), comm, settings, start.go_on)
        with run:
            if start.recorded is not None:
                console.get_logger().info("going on after step %d", trainer.progress.step)
                for sentence in say_changes(start.recorded, start.config):
                    console.get_logger().info("%s", sentence)
            branch = start.go_on is not None and not start.go_on.in_place
            result = trainer.run(run.telemetry, run.checkpoints, branch)
            if comm.rank == 0:
                run.finish(trainer.model, result)
                show_result(output, settings, result)


@contextmanager
def world(settings: Config) -> Iterator[tuple[Lease, Communicator, int, Watchdog]]:
    """Yield the open store, the communicator, this rank's threads and the watchdog, which runs meanwhile."""
    from horovod_trainer import console
    from horovod_trainer.comm.backends import open_communicator
    from horovod_trainer.data import staging
    from horovod_trainer.launch import end_earlier_tries

    if launcher_local_rank() == 0:
        end_earlier_tries()
    with Watchdog(settings.train.watchdog_s, farewell) as watchdog:
        # before Horovod starts: what is missing is said at once, and nobody waits in a collective for a copy
        with watchdog.suspended():
            lease = staging.acquire(settings.data, console.stage_progress)
        allow_for_copies(settings)
        with watchdog.suspended() if settings.data.stage is not None else nullcontext():  # other nodes still copy
            comm = open_communicator(settings.train.communicator)
        yield lease, comm, set_threads(settings, comm), watchdog
        comm.close()


def show_result(output: str, settings: Config, result: dict[str, Any]) -> None:
    """Show a finished run: its scores and where its curves are."""
    from horovod_trainer import console
    from horovod_trainer.run import PLOT

    rows = {f"{split} {name}": value for split in ("valid", "test") for name, value in result[split].items()}
    shown = {"best epoch": result["best_epoch"], "steps": result["steps"], "seconds": round(result["seconds"], 1)}
    edges = "in" if result["validation_edges_in_test_graph"] else "not in"
    ranks = console.counted(result["world"]["size"], "rank")
    title = f"{result['data']['name']}, {ranks}, validation edges at test time: {edges} the graph"
    plot = Path(settings.output.dir) / PLOT
    show(output, title, rows | shown, result, f"ended: {result['ended']}", closing(result, plot))


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
    from horovod_trainer.run import load_model, load_run_config

    console.setup_logging(launcher_rank())
    settings = load_run_config(run, override)
    with world(settings) as (lease, comm, threads, watchdog):
        from horovod_trainer.assemble import build_evaluator, check_store
        from horovod_trainer.devices import pick_device

        store = lease.store
        check_store(settings, store)
        evaluator = build_evaluator(settings, store, comm, threads, split)
        model = load_model(run, settings, evaluator.features.width)
        model = model.to(pick_device(settings.train.device, comm.local_rank))
        result = evaluator.run(model, store.held_out(split), progress=watchdog.counting(console.stage_progress))
        if comm.rank == 0:
            edges = "in" if settings.evaluate.use_valid_edges else "not in"
            show(output, f"{run}, {split}; validation edges {edges} the test graph", result, {"split": split} | result)


@app.command(context_settings={"ignore_unknown_options": True})
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- LAUNCHER ...", help="mpirun, horovodrun or torchrun.")],
    exit_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder that all hosts share, for the first failing rank's words."),
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="NAME", help="What makes two calls tries of one job; else command and folder.")
    ] = None,
) -> None:
    """Start a launcher and say how its job really ended. SIGTERM and Ctrl-C stop the ranks after a checkpoint."""
    from horovod_trainer import console
    from horovod_trainer.launch import Front

    console.setup_logging()
    ended = Front(command, exit_dir, job).run()
    console.print_error(ended.sentences, stopped=ended.code == ExitCode.STOPPED)
    raise typer.Exit(ended.code)


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
    except BaseException as failure:
        end_with(failure)
    leave(code if isinstance(code, int) else ExitCode.OK)
