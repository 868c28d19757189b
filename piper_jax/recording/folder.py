"""The folder of a run."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from piper_jax.config import Config, config_text, load_config
from piper_jax.errors import ConfigError

UNNAMED = "runs/unnamed"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run keeps what outlives its processes; only the first process writes here, except to ``checkpoints``.

    Attributes:
      path: made by :meth:`make`.
    """

    path: Path

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        """The folder that a configuration names: by itself, or by the name of its file."""
        return cls(Path(config.folder or UNNAMED))

    @property
    def config(self) -> Path:
        """The configuration with every default, as :meth:`save` wrote it."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object per line and step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """A folder of event files."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """A folder with one step each."""
        return self.path / "checkpoints"

    def make(self) -> RunFolder:
        """Makes the folder where there is none.

        Raises:
          ConfigError: it cannot be made, or is no folder that can be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = "a file of that name is in the way" if isinstance(error, FileExistsError) else error.strerror
            raise ConfigError(f"folder: {self.path}: {reason}.", help="name another: folder=runs/mine.") from None
        if not os.access(self.path, os.W_OK):
            raise ConfigError(f"folder: {self.path} cannot be written to.", help="name another: folder=runs/mine.")
        return self

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one run at a time may write here; the lock ends with its process, however that ends.

        Raises:
          ConfigError: another run has it; names its process and host.
        """
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise ConfigError(
                    f"folder: another run goes on in {self.path} ({file.read().strip() or 'unknown'}).",
                    help="wait for it or end it, or name another: folder=runs/mine.",
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield

    def save(self, config: Config) -> None:
        """Writes the resolved configuration; what is read meanwhile is the old one or the new one, whole."""
        written = self.config.with_suffix(".yaml.new")
        written.write_text(config_text(config), encoding="utf-8")
        written.replace(self.config)

    def saved(self) -> Config | None:
        """The configuration that was saved here, if any.

        Raises:
          ConfigError: it is none of this version.
        """
        return load_config(self.config) if self.config.exists() else None
