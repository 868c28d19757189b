"""Eight virtual CPU devices for every test, and ``--core``: only the tests that need no JAX, with JAX out of reach."""

from __future__ import annotations

import importlib.abc
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
from matrix_page import MatrixPage

DEVICES = "--xla_force_host_platform_device_count=8"
QUICK = " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
"""Less than half the processor seconds for compiling tiny programs; only older jaxlibs know the first."""
JAX_PACKAGES = frozenset({"jax", "jaxlib", "flax", "optax", "chex"})
IMPORTS_JAX = re.compile(rf"^\s*(?:import|from)\s+(?:{'|'.join(sorted(JAX_PACKAGES))})\b", re.MULTILINE)
FOLDERS_WITH_JAX = frozenset({"docs", "equivalence"})
NEEDS_JAX = re.compile(r"^pytestmark = .*\bneeds_jax\b", re.MULTILINE)

if "jax" not in sys.modules:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"


class _NoJax(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> None:
        if fullname.partition(".")[0] in JAX_PACKAGES:
            raise ModuleNotFoundError(f"{fullname} is out of reach under --core", name=fullname)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", action="store_true", help="only the tests that need no JAX; importing it fails")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--core"):
        sys.meta_path.insert(0, _NoJax())
    if config.getoption("markexpr") and tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
        os.environ["XLA_FLAGS"] += QUICK  # the whole matrix, without -m, compiles as a user does
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(MatrixPage(), "matrix page")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under ``--core``, whole folders are left out, and files that import JAX or say that they need it."""
    if not config.getoption("--core"):
        return None
    if collection_path.is_dir():
        return True if collection_path.name in FOLDERS_WITH_JAX else None
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return True if IMPORTS_JAX.search(text) or NEEDS_JAX.search(text) else None
