"""The command that looks into checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from piper_jax.cli.boundary import EXIT_CHECKPOINT
from piper_jax.config import Config, differing_keys
from piper_jax.errors import ConfigError
from piper_jax.recording import RunFolder


def inspect_checkpoint(path: Path, step: int | None, *, verify: bool, export: Path | None) -> int:
    """Prints steps, leaves, sizes, hashes and what the configuration of the run has changed since; exports.

    Args:
      path: the folder of a run, of its checkpoints, or of one step.
      verify: hold every leaf against its hash.
      export: a ``.safetensors`` file for the parameters.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from piper_jax.checkpoint.export import SUFFIX, export_params
    from piper_jax.checkpoint.inspection import inspection_text, opened

    if export is not None and export.suffix != SUFFIX:
        raise ConfigError(f"--export {export}: not a {SUFFIX} file.", help=f"name it {export.stem}{SUFFIX}.")
    folder, saved = opened(path, step)
    text, is_whole = inspection_text(folder, saved, verify=verify)
    print(text)
    for line in _changes(saved.manifest.config, RunFolder(folder.path.parent)):
        print(f"config   {line}")
    if export is not None:
        print(export_params(saved, export))
    return 0 if is_whole else EXIT_CHECKPOINT


def _changes(saved: object, run: RunFolder) -> list[str]:
    """What the configuration of the run says otherwise than that of the checkpoint."""
    if not isinstance(saved, dict) or not run.config.exists():
        return []
    try:
        before = Config.model_validate(saved)
    except ValidationError:
        return ["that of the checkpoint is of another version"]
    now = run.saved()
    return [] if now is None else [str(difference) for difference in differing_keys(before, now)]
