"""The environment of a process that a test starts: that of a user, but what it compiles it need not compile well."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(cache: Path | None = None, **variables: str) -> dict[str, str]:
    """Without the devices that the tests set for themselves.

    Args:
      cache: a folder for compiled programs, which every process but the first finds.
      variables: set besides.
    """
    own = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "PYTEST_ADDOPTS")}
    own["XLA_FLAGS"] = " ".join(f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f)
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
    if cache is not None:
        own |= {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    return own | variables
