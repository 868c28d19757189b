"""The byte-level GPT of ``gpt.py`` in Flax Linen: same sizes, same losses, a plain pytree of parameters."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

import piper_jax as piper
from piper_jax.models.attention import Packing, causal_attention
from piper_jax.models.gpt_config import GPTConfig, gpt_config
from piper_jax.models.language_model import Batch, LanguageModel, Loss, token_loss

NARROW = nn.initializers.normal(0.02)


class Block(nn.Module):
    """Attention, then MLP, each on a normalized copy of the residual stream."""

    config: GPTConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch length dim"], train: bool, packing: Packing | None
    ) -> Float[Array, "batch length dim"]:
        config = self.config
        dtypes: dict[str, Any] = {"dtype": config.compute_dtype, "param_dtype": config.param_dtype}
        residual = nn.initializers.normal(0.02 / math.sqrt(2 * config.num_layers))
        drop = nn.Dropout(config.dropout, deterministic=not train)

        y = nn.RMSNorm(**dtypes, name="norm_attention")(x)
        y = nn.Dense(3 * config.dim, use_bias=False, kernel_init=NARROW, **dtypes, name="qkv")(y)
        y = causal_attention(y, config.num_heads, packing)
        x = x + drop(nn.Dense(config.dim, use_bias=False, kernel_init=residual, **dtypes, name="out")(y))

        y = nn.RMSNorm(**dtypes, name="norm_mlp")(x)
        y = nn.Dense(config.hidden_dim, use_bias=False, kernel_init=NARROW, **dtypes, name="up")(y)
        y = nn.Dense(config.dim, use_bias=False, kernel_init=residual, **dtypes, name="down")(jax.nn.gelu(y))
        return x + drop(y)


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; dropout needs an rng named ``dropout``."""

    config: GPTConfig

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "batch length"], train: bool = False, packing: Packing | None = None
    ) -> Float[Array, "batch length vocab"]:
        config = self.config
        dtypes: dict[str, Any] = {"dtype": config.compute_dtype, "param_dtype": config.param_dtype}
        embed = nn.Embed(config.vocab_size, config.dim, embedding_init=NARROW, **dtypes, name="embed")
        x = embed(tokens)
        for index in range(config.num_layers):
            with piper.annotate("PP"):
                x = Block(config, name=f"layers_{index}")(x, train, packing)
        x = nn.RMSNorm(**dtypes, name="norm")(x)
        if config.tied_embeddings:
            return embed.attend(x)
        return nn.Dense(config.vocab_size, use_bias=False, kernel_init=NARROW, **dtypes, name="head")(x)


def language_model(**arguments: Any) -> LanguageModel:
    """The Linen GPT for ``piper train``.

    Args:
      **arguments: as for :func:`piper_jax.models.gpt_config.gpt_config`.
    """
    config = gpt_config(**arguments)
    model = GPT(config)

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, 2), jnp.int32))["params"]

    def loss_fn(params: Any, batch: Batch) -> Loss:
        return token_loss(model.apply({"params": params}, batch["tokens"], packing=Packing.of(batch)), batch)

    def dropout_loss_fn(params: Any, batch: Batch, rng: jax.Array) -> Loss:
        inputs = (batch["tokens"], True, Packing.of(batch))
        return token_loss(model.apply({"params": params}, *inputs, rngs={"dropout": rng}), batch)

    return LanguageModel(
        init=init,
        loss_fn=dropout_loss_fn if config.dropout else loss_fn,
        evaluation_loss_fn=loss_fn if config.dropout else None,
        num_active_parameters=config.num_multiplied_parameters,
        attention_width=config.attention_width,
    )
