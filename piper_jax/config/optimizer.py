"""What a configuration may say of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from piper_jax.config.section import Count, Number, Section, several

Fraction = Annotated[Number, Field(ge=0, lt=1)]
Optional = Mapping[str, Mapping[str, Any]]

OPTIMIZERS: Optional = {
    "adamw": {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
    "adam": {"b1": 0.9, "b2": 0.95, "eps": 1e-8},
    "sgd": {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0},
    "lion": {"b1": 0.9, "b2": 0.99, "weight_decay": 0.1},
    "adafactor": {"decay_rate": 0.8, "eps": 1e-30, "weight_decay": 0.0},
    "muon": {"momentum": 0.95, "nesterov": True, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
}
"""Optimizer -> the keys that it has beside those of all, and their defaults."""

SCHEDULES: Optional = {
    "cosine": {"final_fraction": 0.1},
    "linear": {"final_fraction": 0.1},
    "wsd": {"final_fraction": 0.1, "decay_fraction": 0.2},
    "constant": {},
}
"""Schedule -> the keys that it has beside those of all, and their defaults."""


class OptimizerSection(Section):
    """An optimizer, its learning rate, and what is done to gradients before and to parameters after it.

    Keys that only some optimizers or schedules have are null for the others; see ``OPTIMIZERS`` and ``SCHEDULES``.

    Attributes:
      learning_rate: at its peak.
      schedule: after the warm-up: half a ``cosine`` or a ``linear`` decay to the last step; ``wsd``: stable, then a
        linear decay over the last steps; ``constant``.
      warmup_steps: from 0 to the peak, linear.
      final_fraction: the last step's rate as a part of the peak.
      decay_fraction: of the steps after the warm-up, over which ``wsd`` decays.
      b1, b2, eps: of Adam and Lion; of ``muon`` for what is no matrix.  momentum, nesterov: of ``sgd`` and ``muon``.
      decay_rate: exponent of Adafactor's running averages.
      weight_decay: decoupled, times the learning rate.
      decay_paths: regular expressions that are searched in the paths of parameters (``layers.0.up.kernel``); those that
        match decay. Null: matrices decay, vectors do not.
      clip_norm: bound of the global gradient norm; null means no clipping.
      accumulate_steps: gradients of so many steps are averaged for one update.
      ema_decay: keeps an average of the parameters, ``ema = ema_decay * ema + (1 - ema_decay) * parameters``.
    """

    name: Literal["adamw", "adam", "sgd", "lion", "adafactor", "muon"] = "adamw"
    learning_rate: Annotated[Number, Field(gt=0)] = 3e-4
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    final_fraction: Annotated[Number, Field(ge=0, le=1)] | None = None
    decay_fraction: Annotated[Number, Field(gt=0, le=1)] | None = None
    b1: Fraction | None = None
    b2: Fraction | None = None
    eps: Annotated[Number, Field(gt=0)] | None = None
    momentum: Fraction | None = None
    nesterov: bool | None = None
    decay_rate: Annotated[Number, Field(gt=0, lt=1)] | None = None
    weight_decay: Annotated[Number, Field(ge=0)] | None = None
    decay_paths: Annotated[tuple[str, ...] | None, BeforeValidator(several)] = None
    clip_norm: Annotated[Number, Field(gt=0)] | None = 1.0
    accumulate_steps: Count = 1
    ema_decay: Fraction | None = None

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, values: Any) -> Any:
        """Keys that are not given, or null, are the defaults of this optimizer and this schedule."""
        if not isinstance(values, Mapping):
            return values
        own = _own(values.get("name", "adamw"), values.get("schedule", "cosine"))
        return {**values, **{key: value for key, value in own.items() if values.get(key) is None}}

    def foreign(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Keys that are set although this optimizer or schedule has them not -> who, and which it has."""
        of_schedules = {key for own in SCHEDULES.values() for key in own}
        of_optimizers = {key for own in OPTIMIZERS.values() for key in own}
        found: dict[str, tuple[str, tuple[str, ...]]] = {}
        for name, keys, table in ((self.name, of_optimizers, OPTIMIZERS), (self.schedule, of_schedules, SCHEDULES)):
            set_here = [key for key in type(self).model_fields if key in keys and getattr(self, key) is not None]
            found.update({key: (name, tuple(table[name])) for key in set_here if key not in table[name]})
        return found


def _own(name: object, schedule: object) -> dict[str, Any]:
    return {**OPTIMIZERS.get(str(name), {}), **SCHEDULES.get(str(schedule), {})}
