"""The steps in a folder of checkpoints: which are committed, which are kept, what an ended process left. No JAX.

A step is a folder named after it. Orbax writes it under another name, and renames it when all of it is written.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from piper_jax.errors import CheckpointError

UNFINISHED = ".orbax-checkpoint-tmp"
DELETED = ".deleted"
DAMAGED = ".damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFolder:
    """A folder of checkpoints.

    Attributes:
      keep: the newest steps that are kept; None means all.
      keep_every: multiples of this many steps are kept besides; None means none.
    """

    path: Path
    keep: int | None = 3
    keep_every: int | None = None

    def steps(self) -> list[int]:
        """Committed steps, in order."""
        if not self.path.is_dir():
            return []
        return sorted(int(found.name) for found in self.path.iterdir() if found.name.isdigit() and found.is_dir())

    def of(self, step: int) -> Path:
        """The folder of a step, committed or not."""
        return self.path / str(step)

    def existing(self, step: int | None) -> list[int]:
        """The steps that may be loaded, newest first: the one asked for, or all.

        Raises:
          CheckpointError: there is none.
        """
        found = self.steps()
        if step is not None and step not in found:
            known = ", ".join(map(str, found)) or "none"
            raise CheckpointError(f"checkpoint {self.path}: there is no step {step}.", help=f"steps: {known}.")
        if not found:
            raise CheckpointError(f"checkpoint {self.path}: there are no steps.", help="give the folder of a run.")
        return [step] if step is not None else found[::-1]

    def set_aside(self, step: int) -> Path:
        """Gives a damaged step another name, so that it may be looked at, and saved again; that name."""
        aside = self.path / f"{step}{DAMAGED}"
        shutil.rmtree(aside, ignore_errors=True)
        return self.of(step).rename(aside)

    def prune(self) -> None:
        """Deletes what need not be kept. A step is renamed first, so that no process finds half of one."""
        steps = self.steps()
        newest = steps if self.keep is None else steps[-self.keep :]
        for step in steps:
            if step not in newest and not (self.keep_every and step % self.keep_every == 0):
                gone = self.path / f"{step}{DELETED}"
                self.of(step).rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def sweep(self) -> None:
        """Deletes what a process that ended in the middle left; call it when no other one is writing."""
        for found in self.path.iterdir() if self.path.is_dir() else ():
            if UNFINISHED in found.name or found.name.endswith(DELETED):
                shutil.rmtree(found, ignore_errors=True)
