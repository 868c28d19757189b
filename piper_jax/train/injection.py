"""Faults on demand, from the section ``faults`` of a configuration: how a run bears them can be tried out."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from piper_jax.config import FaultMoment, FaultSection
from piper_jax.data import Batch
from piper_jax.models.language_model import LanguageModel

POISON = "fault"
FULL_DISK_BYTES = 1024
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}


class Faults:
    """What is to happen in this run; each fault happens once."""

    def __init__(self, sections: Sequence[FaultSection]):
        self._left = list(sections)
        self._happened: set[FaultSection] = set()
        self._poisons = any(section.kind == "nan" for section in sections)

    def reach(self, step: int, moment: FaultMoment) -> None:
        """To be called at each moment, with the step that is being made or was made last."""
        here = [s for s in self._left if s.process == jax.process_index()]
        for section in [s for s in here if (s.step, s.moment) == (step, moment)]:
            if section.kind in SIGNALS:
                self._left.remove(section)
                os.kill(os.getpid(), SIGNALS[section.kind])
            elif section.kind == "hang":
                self._left.remove(section)
                while True:
                    time.sleep(3600)

    def missed(self) -> list[str]:
        """The faults of this process that have not happened, as they were asked for."""
        here = (s for s in self._left if s.process == jax.process_index() and s not in self._happened)
        return [f"{s.kind} at step {s.step}" + f", moment {s.moment}" * (s.kind != "nan") for s in here]

    @contextmanager
    def around_save(self, step: int) -> Iterator[None]:
        """The system refuses to write files of any size, where the disk is to be full."""
        if not self.fills_disk(step):
            yield
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def fills_disk(self, step: int) -> bool:
        """Whether the save of this step has to end before files may be written again."""
        return self._happens(step, "disk_full")

    # -- not a number -----------------------------------------------------------------------------------
    def batch(self, step: int, batch: Batch) -> Batch:
        """The batch of a step, with a leaf that makes the loss of the last microbatch NaN where that is to happen."""
        if not self._poisons:
            return batch
        poison = np.zeros(len(next(iter(batch.values()))), np.float32)
        if self._happens(step, "nan"):
            poison[-1] = 1
        return {**batch, POISON: poison}

    def _happens(self, step: int, kind: str) -> bool:
        found = [s for s in self._left if (s.step, s.kind) == (step, kind)]
        self._happened.update(found)
        return bool(found)


def poisonable(model: LanguageModel, sections: Sequence[FaultSection]) -> LanguageModel:
    """The model with a loss that the leaf of :meth:`Faults.batch` scales, if a section asks for NaN."""
    if not any(section.kind == "nan" for section in sections):
        return model
    evaluated = model.evaluation_loss_fn
    return replace(
        model, loss_fn=_scaled(model.loss_fn), evaluation_loss_fn=None if evaluated is None else _scaled(evaluated)
    )


def poison_shapes(size: int, sections: Sequence[FaultSection]) -> dict[str, jax.ShapeDtypeStruct]:
    """What :meth:`Faults.batch` adds to a batch."""
    poisons = any(section.kind == "nan" for section in sections)
    return {POISON: jax.ShapeDtypeStruct((size,), np.float32)} if poisons else {}


def _scaled(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(loss_fn)
    def scaled(params: Any, batch: Mapping[str, Any], *rest: Any) -> Any:
        found = loss_fn(params, {k: v for k, v in batch.items() if k != POISON}, *rest)
        loss, *aux = found if isinstance(found, tuple) else (found,)
        scale = jnp.where(batch[POISON].sum() > 0, jnp.nan, 1.0)
        loss = replace(loss, total=loss.total * scale) if hasattr(loss, "total") else loss * scale
        return (loss, *aux) if aux else loss

    return scaled
