"""Sizes of the example GPTs. Imports no JAX, so that a configuration is checked before anything else happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from piper_jax.errors import ConfigError
from piper_jax.models.presets import Dtype, from_preset


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """A decoder-only transformer (RMSNorm before each block, rotary positions, GELU).

    Attributes:
      num_layers: blocks; each is one pipeline unit.
      dim: width of the residual stream, a multiple of ``2 * num_heads``.
      num_heads: attention heads.
      mlp_dim: width of the hidden layer; 0 means ``4 * dim``.
      vocab_size: 256 for bytes.
      tied_embeddings: the head is the transposed embedding, one parameter used at both ends of the pipeline.
      dropout: rate on the output of attention and MLP, in [0, 1); 0 means the loss draws no random numbers.
      compute_dtype: of activations and matrix products. Norms, softmax and the loss are at least float32.
      param_dtype: of parameters, and so of gradients and optimizer state.
    """

    num_layers: int = 8
    dim: int = 128
    num_heads: int = 4
    mlp_dim: int = 0
    vocab_size: int = 256
    tied_embeddings: bool = False
    dropout: float = 0.0
    compute_dtype: Dtype = "float32"
    param_dtype: Dtype = "float32"

    @property
    def hidden_dim(self) -> int:
        return self.mlp_dim or 4 * self.dim

    @property
    def num_parameters(self) -> int:
        """All parameters, embeddings and head included."""
        block = 4 * self.dim**2 + 2 * self.dim * self.hidden_dim + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tied_embeddings else 2)
        return embeddings + self.num_layers * block + self.dim

    @property
    def num_multiplied_parameters(self) -> int:
        """Those that each token is multiplied by: not an embedding that is only looked up."""
        return self.num_parameters - (0 if self.tied_embeddings else self.vocab_size * self.dim)

    @property
    def attention_width(self) -> int:
        """Layers x heads x width of a head."""
        return self.num_layers * self.dim


PRESETS = {
    "tiny": GPTConfig(num_layers=4, dim=32, num_heads=2),
    "demo": GPTConfig(num_layers=8, dim=64, num_heads=2),
    "small": GPTConfig(num_layers=12, dim=768, num_heads=12, compute_dtype="bfloat16"),
}


def gpt_config(*, preset: str = "demo", **changes: Any) -> GPTConfig:
    """A preset with some fields changed.

    Args:
      preset: ``"tiny"`` (4 x 32), ``"demo"`` (8 x 64) or ``"small"`` (12 x 768, bf16 compute).
      **changes: fields of :class:`GPTConfig`.

    Raises:
      ConfigError: an unknown preset or field, a value of the wrong type, or sizes that do not fit each other.
    """
    config = from_preset("gpt", PRESETS, preset, changes)
    _check_sizes(config)
    return config


def _check_sizes(config: GPTConfig) -> None:
    for name in ("num_layers", "dim", "num_heads", "vocab_size"):
        if getattr(config, name) < 1:
            raise ConfigError(f"gpt: {name}={getattr(config, name)} is not positive.", help="use 1, 2, 3, ...")
    if config.mlp_dim < 0:
        raise ConfigError(f"gpt: mlp_dim={config.mlp_dim} is negative.", help="0 means 4 * dim.")
    if config.dim % (2 * config.num_heads):
        raise ConfigError(
            f"gpt: dim={config.dim} does not divide into {config.num_heads} heads of even width.",
            help=f"use dim={-(-config.dim // (2 * config.num_heads)) * 2 * config.num_heads}, or fewer heads.",
        )
    if not 0 <= config.dropout < 1:
        raise ConfigError(f"gpt: dropout={config.dropout} is not in [0, 1).", help="0.1 is usual.")
