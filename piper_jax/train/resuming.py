"""What a run goes on from: the newest checkpoint in its folder, if the configuration still means the same run."""

from __future__ import annotations

import jax
from pydantic import ValidationError

from piper_jax.checkpoint import Checkpointer, Loaded
from piper_jax.config import Config, differing_keys
from piper_jax.errors import ConfigError
from piper_jax.recording import RunFolder

FREE = (
    "strategy", "devices", "evaluation", "logging", "checkpoint", "faults", "folder", "profile", "train.log_every",
    "train.on_nonfinite", "train.max_skipped",
)  # fmt: skip
"""Sections and keys that may change between two runs of one training."""


def checkpointer(config: Config, folder: RunFolder) -> Checkpointer | None:
    """Where a run saves; None if it saves nothing."""
    section = config.checkpoint
    if not section.every:
        return None
    return Checkpointer(path=folder.checkpoints, keep=section.keep, keep_every=section.keep_every)


def last_saved(config: Config, checkpoints: Checkpointer | None) -> Loaded | None:
    """The checkpoint to go on from; None where there is none.

    Raises:
      CheckpointError: it is damaged.
      ConfigError: keys that the result depends on have changed since.
    """
    if checkpoints is None:
        return None
    if jax.process_index() == 0:
        checkpoints.folder.sweep()
    if not checkpoints.steps():
        return None
    found = checkpoints.load(on_corrupt=config.checkpoint.on_corrupt)
    if not config.checkpoint.accept_changes:
        _check_same(config, found)
    if jax.process_index() == 0:
        for error in found.passed_over:
            checkpoints.folder.set_aside(int(str(error.data["step"])))
    return found


def _check_same(config: Config, found: Loaded) -> None:
    try:
        before = Config.model_validate(found.manifest.config)
    except ValidationError as error:
        first = error.errors()[0]
        changes = [f"{'.'.join(map(str, first['loc']))}: {first['msg']}"]
    else:
        differences = differing_keys(before, config)
        changes = [str(d) for d in differences if not d.key.startswith(FREE)]
    if changes:
        raise ConfigError(
            f"{config.folder}: the checkpoint of step {found.step} is of another configuration.",
            detail=changes,
            help="name another folder=..., or set them back, or checkpoint.accept_changes=true to go on with them.",
        )
