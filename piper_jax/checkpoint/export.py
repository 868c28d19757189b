"""Parameters of a checkpoint as one safetensors file, with their paths as names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from piper_jax.checkpoint.reading import SavedStep
from piper_jax.errors import CheckpointError, ConfigError, counted, writing

SUFFIX = ".safetensors"


def export_params(saved: SavedStep, path: Path) -> str:
    """Writes the parameters, each held against its hash; says what was written.

    Random keys among them are left out: safetensors has no such thing.

    Raises:
      CheckpointError: a leaf is damaged, or of a dtype that safetensors does not have.  ConfigError: no such folder.
    """
    keys = {leaf.name for leaf in saved.manifest.leaves["params"] if leaf.dtype.startswith("key<")}
    params = {name: np.ascontiguousarray(value) for name, value in saved.params().items() if name not in keys}
    metadata = {"format": "flax", "step": str(saved.manifest.step)}
    try:
        with writing(path):
            save_file(params, path, metadata=metadata)
    except SafetensorError as error:
        raise ConfigError(f"export: {path}: {error}.", help="give a path in a folder that is there.") from None
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"export: {path}: {error}.", help="safetensors holds plain numbers alone.") from None
    return f"wrote {path}: {counted(len(params), 'leaf')} of step {saved.manifest.step}"
