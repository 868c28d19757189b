"""What import-linter cannot see: the core really imports without JAX, and one file alone knows JAX's private names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "piper_jax"
CORE = ("errors", "ir", "primitives", "planning", "simulation", "visualization", "config", "cli")
BLOCKED = ("jax", "jaxlib", "flax", "optax", "chex", "jaxtyping")

IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path.insert(0, {root!r})
for name in {blocked!r}:
    sys.modules[name] = None
for name in {core!r}:
    module = importlib.import_module("piper_jax." + name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), module.__name__ + "."):
        importlib.import_module(found.name)
import piper_jax
piper_jax.where, piper_jax.Plan, piper_jax.Strategy, piper_jax.simulate, piper_jax.draw, piper_jax.directive
print(len([name for name in sys.modules if name.startswith("piper_jax")]))
"""


@pytest.mark.timeout(60)
def test_the_core_imports_without_jax():
    script = IMPORT_ALL.format(root=str(PACKAGE.parent), blocked=BLOCKED, core=CORE)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


def test_private_names_of_jax_are_in_one_file():
    private = re.compile(r"\bjax\._src\b|\bfrom jax import _src\b")
    found = {path.name for path in PACKAGE.rglob("*.py") if private.search(path.read_text(encoding="utf-8"))}
    assert found == {"_jax_compat.py"}
