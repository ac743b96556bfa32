"""What must start fast stays light: the package, its help and its configuration load no heavy library."""

import subprocess
import sys

import pytest

HEAVY = {
    "torch",
    "horovod",
    "numpy",
    "numba",
    "scipy",
    "mpi4py",
    "matplotlib",
    "tensorboardX",
    "torch_geometric",
    "ogb",
}

REPORT = """
import atexit, sys
atexit.register(lambda: print("LOADED", *sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded(code: str) -> set[str]:
    """Return the top-level packages in sys.modules when a fresh interpreter has run `code`."""
    run = subprocess.run(
        [sys.executable, "-c", REPORT + code], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.splitlines()[-1].split()[1:])


def command(*arguments: str) -> str:
    """Return code that runs `python -m horovod_trainer` with the arguments in this interpreter."""
    return (
        f"import runpy\nsys.argv[1:] = {list(arguments)!r}\n"
        "runpy.run_module('horovod_trainer', run_name='__main__', alter_sys=True)\n"
    )


def test_the_check_itself_sees_what_is_loaded() -> None:
    assert "numpy" in loaded("import numpy")


def test_importing_the_package_loads_nothing_heavy() -> None:
    packages = loaded("import horovod_trainer")
    assert "horovod_trainer" in packages
    assert not packages & (HEAVY | {"rich", "pydantic", "yaml"})


@pytest.mark.parametrize("module", ["config", "console", "documents", "errors", "telemetry"])
def test_what_light_commands_use_loads_nothing_heavy(module: str) -> None:
    assert not loaded(f"import horovod_trainer.{module}") & (HEAVY | {"rich"})


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["config"]])
def test_help_and_config_load_nothing_heavy(arguments: list[str]) -> None:
    packages = loaded(command(*arguments))
    assert "typer" in packages
    assert not packages & HEAVY
