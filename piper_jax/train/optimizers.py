"""The optimizer section as an optax transformation."""

from __future__ import annotations

from typing import Any

import jax
import optax

from piper_jax.config import OptimizerSection


def build_optimizer(section: OptimizerSection, num_steps: int) -> optax.GradientTransformation:
    """Adam with decoupled weight decay, after clipping by the global norm.

    Args:
      num_steps: over which the learning rate warms up and decays.
    """
    adamw = optax.adamw(
        learning_rate(section, num_steps),
        b1=section.b1,
        b2=section.b2,
        eps=section.eps,
        weight_decay=section.weight_decay,
        mask=_matrices,
    )
    if section.clip_norm is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(section.clip_norm), adamw)


def learning_rate(section: OptimizerSection, num_steps: int) -> optax.Schedule:
    """Linear from 0 to the peak, then half a cosine to the final fraction of it."""
    peak = section.learning_rate
    decay = optax.cosine_decay_schedule(peak, max(num_steps - section.warmup_steps, 1), alpha=section.final_fraction)
    if not section.warmup_steps:
        return decay
    return optax.join_schedules([optax.linear_schedule(0.0, peak, section.warmup_steps), decay], [section.warmup_steps])


def _matrices(params: Any) -> Any:
    """Which leaves decay: matrices, not the scales of norms."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
