"""Learning rates over the steps of a run."""

from __future__ import annotations

import optax

from piper_jax.config import OptimizerSection


def learning_rate(section: OptimizerSection, num_steps: int) -> optax.Schedule:
    """Linear from 0 to the peak, then as ``section.schedule`` says, ending at ``final_fraction`` of it.

    Args:
      num_steps: of the run; the schedule takes steps of training, whatever number of them make one update.
    """
    peak, warmup = section.learning_rate, section.warmup_steps
    rest = max(num_steps - warmup, 1)
    if not warmup:
        return _after_warmup(section, rest)
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), _after_warmup(section, rest)], [warmup])


def _after_warmup(section: OptimizerSection, num_steps: int) -> optax.Schedule:
    peak, fraction = section.learning_rate, section.final_fraction
    final = peak if fraction is None else peak * fraction
    match section.schedule:
        case "cosine":
            return optax.cosine_decay_schedule(peak, num_steps, alpha=final / peak)
        case "linear":
            return optax.linear_schedule(peak, final, num_steps)
        case "constant":
            return optax.constant_schedule(peak)
        case "wsd":
            decay = max(round(num_steps * (section.decay_fraction or 0)), 1)
            parts = [optax.constant_schedule(peak), optax.linear_schedule(peak, final, decay)]
            return optax.join_schedules(parts, [num_steps - decay])
