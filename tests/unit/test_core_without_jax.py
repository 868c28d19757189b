"""The core plans, checks, saves and prints on a machine without JAX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax", "optax", "chex", "numpy"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import pkgutil
import piper_jax as piper

for package in ("ir", "primitives", "planning", "topology", "simulation", "visualization", "device_map"):
    __import__(f"piper_jax.{package}")
    for module in pkgutil.walk_packages(sys.modules[f"piper_jax.{package}"].__path__, f"piper_jax.{package}."):
        __import__(module.name)

from traced_dags import chain

plan = chain(4).apply(piper.Strategy(pipeline_parallel=2, data_parallel=4, zero_stage=1)).check()
print(plan)
print(piper.simulate(plan).makespan)
assert "jax" not in sys.modules
"""


def test_the_core_imports_and_plans_without_jax():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("plan  stages=2 microbatches=4")
