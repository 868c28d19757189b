"""A mixture-of-experts decoder in Flax NNX. The only lines about parallelism are those with ``piper``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import piper_jax as piper
from piper_jax.models.attention import Packing
from piper_jax.models.grouped_attention import GroupedAttention
from piper_jax.models.language_model import Batch, LanguageModel, Loss, token_loss
from piper_jax.models.mixture import Mixture
from piper_jax.models.moe_config import MoEConfig, moe_config
from piper_jax.models.swiglu import SwiGLU

Statistics = dict[str, Any]


class Block(nnx.Module):
    """Attention, then experts (or a plain MLP), each on a normalized copy of the residual stream."""

    def __init__(self, config: MoEConfig, *, dense: bool, rngs: nnx.Rngs):
        dtypes = {"dtype": config.compute_dtype, "param_dtype": config.param_dtype}
        self.norm_attention = nnx.RMSNorm(config.dim, **dtypes, rngs=rngs)
        self.attention = GroupedAttention(config, rngs=rngs)
        self.norm_mlp = nnx.RMSNorm(config.dim, **dtypes, rngs=rngs)
        self.mlp = SwiGLU(config, config.dense_dim, rngs=rngs) if dense else Mixture(config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch length dim"], packing: Packing | None = None
    ) -> tuple[Float[Array, "batch length dim"], Statistics]:
        x = x + self.attention(self.norm_attention(x), packing)
        y, statistics = self.norm_mlp(x), {}
        if isinstance(self.mlp, Mixture):
            y, statistics = self.mlp(y)
        else:
            y = self.mlp(y)
        return x + y, statistics


class MoE(nnx.Module):
    """Tokens in, logits of the next token out, and what each layer says of its experts."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        dtypes = {"dtype": config.compute_dtype, "param_dtype": config.param_dtype}
        narrow = nnx.initializers.normal(0.02)
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.dim, embedding_init=narrow, **dtypes, rngs=rngs)
        dense = [index < config.num_dense_layers for index in range(config.num_layers)]
        self.layers = nnx.List([Block(config, dense=plain, rngs=rngs) for plain in dense])
        self.norm = nnx.RMSNorm(config.dim, **dtypes, rngs=rngs)
        if not config.tied_embeddings:
            self.head = nnx.Linear(
                config.dim, config.vocab_size, use_bias=False, kernel_init=narrow, **dtypes, rngs=rngs
            )

    def __call__(
        self, tokens: Int[Array, "batch length"], packing: Packing | None = None
    ) -> tuple[Float[Array, "batch length vocab"], Statistics]:
        """Logits at every position.

        Args:
          tokens: int32, below ``vocab_size``.
          packing: of several documents in a sequence.

        Returns:
          ``(logits, statistics)``: for each name that :class:`piper_jax.models.mixture.Mixture` gives, a list with
          an item for each layer that has experts.
        """
        x, statistics = self.embed(tokens), {}
        for layer in self.layers:
            with piper.annotate("PP"):
                x, of_layer = layer(x, packing)
            for name, value in of_layer.items():
                statistics.setdefault(name, []).append(value)
        x = self.norm(x)
        return (self.embed.attend(x) if self.config.tied_embeddings else self.head(x)), statistics


def loss_fn(model: MoE, batch: Batch) -> tuple[Loss, Statistics]:
    """Mean cross-entropy of the targets, in nats, plus ``balance_weight`` times the balance losses of layers.

    Returns:
      ``(loss, statistics)``; the statistics are those of the layers, and ``token_loss``, the cross-entropy alone (with
      packing, the mean over slices of each one's own).
    """
    logits, statistics = model(batch["tokens"], Packing.of(batch))
    loss = tokens = token_loss(logits, batch)
    if isinstance(loss, piper.WeightedLoss):
        tokens = loss.total / jnp.maximum(loss.weight, 1)
    for balance in statistics.get("balance_loss", ()):
        loss = _plus(loss, model.config.balance_weight * balance)
    return loss, {"token_loss": tokens, **statistics}


def evaluation_loss_fn(model: MoE, batch: Batch) -> Loss:
    """Mean cross-entropy of the targets, in nats."""
    return token_loss(model(batch["tokens"], Packing.of(batch))[0], batch)


def _plus(loss: Loss, term: Float[Array, ""]) -> Loss:
    """A loss with a term that is the mean over slices, however many targets they have."""
    return loss._replace(extra=loss.extra + term) if isinstance(loss, piper.WeightedLoss) else loss + term


def summary(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What a line of ``piper train`` shows: losses by name, dropped tokens, and how much the busiest expert has.

    Returns:
      ``balance``: mean of the layers, 1 where all experts are used alike; ``dropped``: mean part of the choices;
      ``busiest``: choices of the busiest expert of any layer, as a multiple of an equal share.
    """
    found = {"tokens": float(metrics["token_loss"])}
    for name, key in (("balance", "balance_loss"), ("dropped", "dropped_fraction")):
        if key in metrics:
            found[name] = float(np.mean([float(value) for value in metrics[key]]))
    loads = np.stack([np.asarray(load) for load in metrics["expert_load"]])
    found["busiest"] = float((loads.max(-1) / loads.mean(-1)).max())
    return found


def language_model(**arguments: Any) -> LanguageModel:
    """The mixture-of-experts decoder for ``piper train``.

    Args:
      **arguments: as for :func:`piper_jax.models.moe_config.moe_config`.
    """
    config = moe_config(**arguments)
    return LanguageModel(
        init=lambda key: MoE(config, rngs=nnx.Rngs(params=key)),
        loss_fn=loss_fn,
        evaluation_loss_fn=evaluation_loss_fn,
        summary=summary,
        num_active_parameters=config.num_multiplied_parameters,
        attention_width=config.attention_width,
    )
