"""Metrics as a run of Weights & Biases."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping
from typing import Any

from piper_jax.config import Config, WandbSection
from piper_jax.errors import ConfigError
from piper_jax.recording.base import Facts
from piper_jax.recording.folder import RunFolder


class WeightsAndBiases:
    """A run that goes on when the job does: its id is kept in the folder. The service keeps what it has of a step."""

    def __init__(self, section: WandbSection, config: Config, folder: RunFolder):
        identity = folder.path / "wandb-id"
        if not identity.exists():
            identity.write_text(uuid.uuid4().hex)
        self._run: Any = require_wandb().init(
            project=section.project, entity=section.entity, name=section.name or folder.path.name, mode=section.mode,
            id=identity.read_text(), resume="allow", dir=str(folder.path), config=config.model_dump(mode="json"),
        )  # fmt: skip

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def say(self, step: int, facts: Facts) -> None:
        self._run.config.update(dict(facts), allow_val_change=True)

    def flush(self) -> None:
        """It sends by itself."""

    def close(self) -> None:
        self._run.finish()


def require_wandb() -> Any:
    """The package.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise ConfigError(
            "logging.wandb: the package wandb is not installed.",
            help="pip install 'piper-jax[wandb]', or set logging.wandb=null.",
        ) from None
