"""Every module stands in the layers that import-linter proves."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_module_has_a_layer() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    listed = set(re.findall(r"[\w.]+", " ".join(layers)))
    package = ROOT / "horovod_trainer"
    modules = {
        ".".join(file.relative_to(package).with_suffix("").parts)
        for file in package.rglob("*.py")
        if file.name != "__init__.py"
    }
    missing = {name for name in modules if not any(name == layer or name.startswith(f"{layer}.") for layer in listed)}
    assert not missing, f"add to a layer in pyproject.toml: {sorted(missing)}"
