"""The same to ten digits in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_float64_in_a_process_of_its_own() -> None:
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    flags = {"JAX_ENABLE_X64": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(HERE / "float64_process.py")]
    done = subprocess.run(
        command, env={**os.environ, **flags}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
