"""A byte-level GPT in Flax NNX. The only lines about parallelism are those with ``piper``."""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

import piper_jax as piper
from piper_jax.models.attention import Packing, causal_attention
from piper_jax.models.gpt_config import GPTConfig, gpt_config
from piper_jax.models.language_model import Batch, LanguageModel, Loss, token_loss


class Block(nnx.Module):
    """Attention, then MLP, each on a normalized copy of the residual stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        dim, dtypes = config.dim, {"dtype": config.compute_dtype, "param_dtype": config.param_dtype}
        narrow = nnx.initializers.normal(0.02)
        residual = nnx.initializers.normal(0.02 / math.sqrt(2 * config.num_layers))
        self.num_heads = config.num_heads
        self.norm_attention = nnx.RMSNorm(dim, **dtypes, rngs=rngs)
        self.qkv = nnx.Linear(dim, 3 * dim, use_bias=False, kernel_init=narrow, **dtypes, rngs=rngs)
        self.out = nnx.Linear(dim, dim, use_bias=False, kernel_init=residual, **dtypes, rngs=rngs)
        self.norm_mlp = nnx.RMSNorm(dim, **dtypes, rngs=rngs)
        self.up = nnx.Linear(dim, config.hidden_dim, use_bias=False, kernel_init=narrow, **dtypes, rngs=rngs)
        self.down = nnx.Linear(config.hidden_dim, dim, use_bias=False, kernel_init=residual, **dtypes, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self, x: Float[Array, "batch length dim"], key: Any = None, packing: Packing | None = None
    ) -> Float[Array, "batch length dim"]:
        rngs = None if key is None else nnx.Rngs(dropout=key)
        attended = self.out(causal_attention(self.qkv(self.norm_attention(x)), self.num_heads, packing))
        x = x + self.dropout(attended, deterministic=key is None, rngs=rngs)
        hidden = self.down(jax.nn.gelu(self.up(self.norm_mlp(x))))
        return x + self.dropout(hidden, deterministic=key is None, rngs=rngs)


class GPT(nnx.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        dtypes = {"dtype": config.compute_dtype, "param_dtype": config.param_dtype}
        narrow = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(config.vocab_size, config.dim, embedding_init=narrow, **dtypes, rngs=rngs)
        self.layers = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.dim, **dtypes, rngs=rngs)
        if not config.tied_embeddings:
            self.head = nnx.Linear(
                config.dim, config.vocab_size, use_bias=False, kernel_init=narrow, **dtypes, rngs=rngs
            )
        self.tied = config.tied_embeddings

    def __call__(
        self, tokens: Int[Array, "batch length"], key: Any = None, packing: Packing | None = None
    ) -> Float[Array, "batch length vocab"]:
        """Logits at every position.

        Args:
          tokens: int32, below ``vocab_size``.
          key: of the dropout masks; None means no dropout.
          packing: of several documents in a sequence.
        """
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            with piper.annotate("PP"):
                x = layer(x, None if key is None else jax.random.fold_in(key, index), packing)
        x = self.norm(x)
        return self.embed.attend(x) if self.tied else self.head(x)


def loss_fn(model: GPT, batch: Batch) -> Loss:
    """Mean cross-entropy of the targets, in nats, without dropout."""
    return token_loss(model(batch["tokens"], packing=Packing.of(batch)), batch)


def dropout_loss_fn(model: GPT, batch: Batch, rng: jax.Array) -> Loss:
    """Mean cross-entropy of the targets, in nats, with dropout masks drawn from ``rng``."""
    return token_loss(model(batch["tokens"], rng, Packing.of(batch)), batch)


def language_model(**arguments: Any) -> LanguageModel:
    """The NNX GPT for ``piper train``.

    Args:
      **arguments: as for :func:`piper_jax.models.gpt_config.gpt_config`.
    """
    config = gpt_config(**arguments)
    return LanguageModel(
        init=lambda key: GPT(config, rngs=nnx.Rngs(params=key)),
        loss_fn=dropout_loss_fn if config.dropout else loss_fn,
        evaluation_loss_fn=loss_fn if config.dropout else None,
        num_active_parameters=config.num_multiplied_parameters,
        attention_width=config.attention_width,
    )
