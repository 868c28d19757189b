"""The optimizer that a configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import optax
from optax import contrib

from piper_jax.config import OptimizerSection
from piper_jax.optimizers.averaging import averaged
from piper_jax.optimizers.decay import decayed
from piper_jax.optimizers.observing import observed
from piper_jax.optimizers.schedules import learning_rate


def build_optimizer(section: OptimizerSection, num_steps: int) -> optax.GradientTransformation:
    """Clipping by the global norm, the optimizer's own direction, decoupled weight decay, the learning rate.

    Around these: an average of the parameters, and accumulation over steps, where the section asks for them.

    Args:
      num_steps: over which the learning rate warms up and decays.
    """
    rate, every = learning_rate(section, num_steps), section.accumulate_steps
    parts = [DIRECTIONS[section.name](section)]
    if section.weight_decay:
        parts.append(optax.add_decayed_weights(section.weight_decay, mask=decayed(section.decay_paths)))
    inner = optax.chain(*parts, optax.scale_by_learning_rate(lambda updates: rate(updates * every)))
    clip_norm = section.clip_norm
    if every > 1 and clip_norm is not None:
        inner, clip_norm = optax.chain(optax.clip_by_global_norm(clip_norm), inner), None
    if section.ema_decay is not None:
        inner = averaged(inner, section.ema_decay)
    if every > 1:
        inner = optax.MultiSteps(inner, every).gradient_transformation()
    return observed(inner, lambda steps: rate(steps // every * every), clip_norm=clip_norm)


def _adam(section: OptimizerSection) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=_set(section.b1), b2=_set(section.b2), eps=_set(section.eps))


def _sgd(section: OptimizerSection) -> optax.GradientTransformation:
    momentum = _set(section.momentum)
    return optax.trace(momentum, nesterov=bool(section.nesterov)) if momentum else optax.identity()


def _lion(section: OptimizerSection) -> optax.GradientTransformation:
    return optax.scale_by_lion(b1=_set(section.b1), b2=_set(section.b2))


def _adafactor(section: OptimizerSection) -> optax.GradientTransformation:
    """Row and column statistics of each matrix, steps relative to the size of the parameters (arXiv 1804.04235)."""
    return optax.chain(
        optax.scale_by_factored_rms(decay_rate=_set(section.decay_rate), epsilon=_set(section.eps)),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )


def _muon(section: OptimizerSection) -> optax.GradientTransformation:
    """Orthogonalized momentum for matrices, Adam for the rest (kellerjordan.github.io/posts/muon)."""
    turned = contrib.muon(
        learning_rate=1.0,
        beta=_set(section.momentum),
        nesterov=bool(section.nesterov),
        eps=_set(section.eps),
        adam_b1=_set(section.b1),
        adam_b2=_set(section.b2),
    )
    return optax.chain(turned, optax.scale(-1.0))


DIRECTIONS: Mapping[str, Callable[[OptimizerSection], optax.GradientTransformation]] = {
    "adamw": _adam,
    "adam": _adam,
    "sgd": _sgd,
    "lion": _lion,
    "adafactor": _adafactor,
    "muon": _muon,
}
"""Optimizer -> what it makes of gradients, to be scaled by minus the learning rate."""


def _set(value: float | None) -> float:
    """A key that the optimizer has, so the section has filled it in."""
    assert value is not None
    return value
