"""What a trainable language model consists of, whichever Flax API it is written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

import piper_jax as piper

Batch = Mapping[str, Any]
Loss = Float[Array, ""] | piper.WeightedLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A model for ``piper train``: what ``model.name`` in a configuration leads to.

    Attributes:
      init: random key -> parameters (a pytree) or an ``nnx.Module``.
      loss_fn: ``loss_fn(params_or_model, batch[, rng])``; the batch is ``{"tokens", "targets"}``, with packing also
        ``"segment_ids"`` and ``"positions"``, each int32 ``[batch, length]``; the loss is the mean over all targets, in
        nats, and a target of -1 is none.
      evaluation_loss_fn: the same without dropout and auxiliary terms; None where that is ``loss_fn`` itself.
      summary: metrics of a step -> what is shown of them beside the loss, by name; None shows the loss alone.
      num_active_parameters: those that each token is multiplied by, for the MFU: of experts the chosen ones, and no
        embedding that is only looked up; None counts all.
      attention_width: layers x heads x width of a head; 0 leaves attention's own products out of the MFU.
    """

    init: Callable[[jax.Array], Any]
    loss_fn: Callable[..., Any]
    evaluation_loss_fn: Callable[..., Any] | None = None
    summary: Callable[[Mapping[str, Any]], Mapping[str, float]] | None = None
    num_active_parameters: int | None = None
    attention_width: int = 0

    def shapes(self) -> Any:
        """What ``init`` returns with ``jax.ShapeDtypeStruct`` leaves; computes nothing."""
        return nnx.eval_shape(lambda: self.init(jax.random.key(0)))


def token_loss(logits: Float[Array, "batch length vocab"], batch: Batch) -> Loss:
    """Mean cross-entropy over all targets, in nats; at least float32 whatever the dtype of the logits.

    In packed sequences a token may have no target, which is -1, so the loss is one that is weighted.
    """
    logits, targets = logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), batch["targets"]
    if "segment_ids" not in batch:
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    counted = targets >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counted, targets, 0))
    return piper.WeightedLoss(jnp.where(counted, losses, 0).sum(), counted.sum().astype(losses.dtype))
