"""Sizes of the mixture-of-experts decoder. Imports no JAX, so a configuration is checked before anything else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from piper_jax.errors import ConfigError
from piper_jax.models.presets import Dtype, from_preset

Routing = Literal["softmax", "sigmoid"]
Dispatch = Literal["capacity", "dropless"]
LoadBalancing = Literal["auxiliary", "dynamic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """A decoder-only transformer whose MLPs are mixtures of experts, in the style of Qwen3-MoE (arXiv 2505.09388).

    Attributes:
      num_layers: blocks; each is one pipeline unit.
      dim: width of the residual stream.
      num_heads, num_key_value_heads: of queries, and of keys and values (grouped-query attention, arXiv 2305.13245);
        the second divides the first.
      head_dim: width of a head, even.
      num_experts, top_k: routed experts of a layer, and how many of them each token goes to.
      expert_dim: width of an expert's hidden layer (SwiGLU: gate, up and down).
      num_shared_experts: experts that every token goes to as well (DeepSeekMoE, arXiv 2401.06066); they are one MLP
        of this many times ``expert_dim``.
      num_dense_layers, dense_dim: the first layers that have a plain MLP of this width instead of experts.
      routing: scores of the experts: ``softmax`` over all of them, or a ``sigmoid`` of each with a bias that is added
        for the choice only (DeepSeek-V3, arXiv 2412.19437). The weights of the chosen ones add up to one.
      dispatch: ``capacity``: each expert takes a fixed number of tokens of a slice and the rest are dropped;
        ``dropless``: tokens sorted by expert, all of them kept.
      capacity_factor: places of an expert, as a multiple of its equal share of the choices.
      row_bound: with ``dropless``, how many rows of a slice one device of the expert axis takes, as a multiple of an
        equal share; more are an error. Infinite: room for all.
      load_balancing: what keeps the experts equally busy: ``auxiliary``: a loss, ``balance_weight`` times that of each
        layer; ``dynamic``: none, but the bias of ``sigmoid`` routing, which from step to step rises by ``bias_rate``
        where an expert got less than an equal share of the choices, and falls where it got more (arXiv 2408.15664).
      balance_weight: of the auxiliary loss; 0 leaves it out.
      vocab_size: 256 for bytes.
      tied_embeddings: the head is the transposed embedding.
      rope_base: of the rotary positions.
      compute_dtype: of activations and matrix products. Norms, routing and the losses are at least float32.
      param_dtype: of parameters, and so of gradients and optimizer state.
    """

    num_layers: int
    dim: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    expert_dim: int
    top_k: int = 2
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    dense_dim: int = 0
    routing: Routing = "softmax"
    dispatch: Dispatch = "capacity"
    capacity_factor: float = 1.25
    row_bound: float = math.inf
    load_balancing: LoadBalancing = "auxiliary"
    balance_weight: float = 0.01
    bias_rate: float = 0.001
    vocab_size: int = 256
    tied_embeddings: bool = False
    rope_base: float = 1_000_000.0
    compute_dtype: Dtype = "float32"
    param_dtype: Dtype = "float32"

    @property
    def has_balance_loss(self) -> bool:
        return self.load_balancing == "auxiliary" and self.balance_weight > 0

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def num_parameters(self) -> int:
        """All parameters, embeddings and head included; the bias of sigmoid routing, which nothing trains, is none."""
        return self._parameters(self.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Those that take part in the prediction of one token."""
        return self._parameters(self.top_k)

    @property
    def num_multiplied_parameters(self) -> int:
        """Active ones that each token is multiplied by: not an embedding that is only looked up."""
        return self.num_active_parameters - (0 if self.tied_embeddings else self.vocab_size * self.dim)

    @property
    def attention_width(self) -> int:
        """Layers x heads x width of a head."""
        return self.num_layers * self.num_heads * self.head_dim

    def _parameters(self, experts: int) -> int:
        queries, keys = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = 2 * self.dim * (queries + keys) + 2 * self.head_dim + 2 * self.dim
        routed = self.dim * self.num_experts + 3 * self.dim * self.expert_dim * (experts + self.num_shared_experts)
        mlps = self.num_expert_layers * routed + self.num_dense_layers * 3 * self.dim * self.dense_dim
        embeddings = self.vocab_size * self.dim * (1 if self.tied_embeddings else 2)
        return embeddings + self.num_layers * attention + mlps + self.dim


PRESETS = {
    "tiny": MoEConfig(
        num_layers=4, dim=32, num_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, expert_dim=32
    ),
    "9M": MoEConfig(
        num_layers=8, dim=256, num_heads=4, num_key_value_heads=2, head_dim=64, num_experts=4, expert_dim=288
    ),
    "1B": MoEConfig(
        num_layers=16, dim=1024, num_heads=16, num_key_value_heads=8, head_dim=128, num_experts=4, expert_dim=3584,
        vocab_size=151_936, compute_dtype="bfloat16",
    ),
    "9B": MoEConfig(
        num_layers=24, dim=2048, num_heads=16, num_key_value_heads=8, head_dim=128, num_experts=8, expert_dim=7168,
        vocab_size=151_936, compute_dtype="bfloat16",
    ),
    "deepseek_tiny": MoEConfig(
        num_layers=4, dim=32, num_heads=4, num_key_value_heads=4, head_dim=8, num_experts=8, expert_dim=16,
        num_shared_experts=1, num_dense_layers=1, dense_dim=64, routing="sigmoid", load_balancing="dynamic",
        rope_base=10_000.0,
    ),
    "deepseek_16B": MoEConfig(
        num_layers=28, dim=2048, num_heads=16, num_key_value_heads=16, head_dim=128, num_experts=64, top_k=6,
        expert_dim=1408, num_shared_experts=2, num_dense_layers=1, dense_dim=10_944, routing="sigmoid",
        load_balancing="dynamic",
        vocab_size=102_400, rope_base=10_000.0, compute_dtype="bfloat16",
    ),
}  # fmt: skip


def moe_config(*, preset: str = "9M", **changes: Any) -> MoEConfig:
    """A preset with some fields changed.

    Args:
      preset: ``"tiny"`` (4 layers x 32, 4 experts), ``"9M"`` (8 x 256, 4 experts), ``"1B"`` (16 x 1024, 4 experts) or
        ``"9B"`` (24 x 2048, 8 experts), all top-2 of softmax scores; ``"deepseek_tiny"`` or ``"deepseek_16B"`` (the
        sizes of DeepSeekMoE 16B: 64 experts, top-6), with shared experts, sigmoid routing and a first dense layer.
      **changes: fields of :class:`MoEConfig`.

    Raises:
      ConfigError: an unknown preset or field, a value of the wrong type, or sizes that do not fit each other.
    """
    config = from_preset("moe", PRESETS, preset, changes)
    _check_sizes(config)
    return config


def _check_sizes(config: MoEConfig) -> None:
    for name in ("num_layers", "dim", "num_heads", "num_key_value_heads", "head_dim", "num_experts", "expert_dim",
                 "top_k", "vocab_size"):  # fmt: skip
        if getattr(config, name) < 1:
            raise ConfigError(f"moe: {name}={getattr(config, name)} is not positive.", help="use 1, 2, 3, ...")
    for name in ("num_shared_experts", "num_dense_layers", "dense_dim", "balance_weight", "bias_rate"):
        if getattr(config, name) < 0:
            raise ConfigError(f"moe: {name}={getattr(config, name)} is negative.", help="0 means none.")
    for wrong, message, fix in _conflicts(config):
        if wrong:
            raise ConfigError(f"moe: {message}", help=fix)


def _conflicts(config: MoEConfig) -> list[tuple[bool, str, str]]:
    heads, groups, dense = config.num_heads, config.num_key_value_heads, config.num_dense_layers
    return [
        (
            heads % groups != 0,
            f"num_heads={heads} does not divide into num_key_value_heads={groups} groups.",
            f"use num_key_value_heads={max(d for d in range(1, min(groups, heads) + 1) if heads % d == 0)}.",
        ),
        (
            config.head_dim % 2 != 0,
            f"head_dim={config.head_dim} is odd; rotary positions turn pairs.",
            f"use head_dim={config.head_dim + 1}.",
        ),
        (
            config.top_k > config.num_experts,
            f"top_k={config.top_k}, but there are {config.num_experts} experts.",
            f"use at most top_k={config.num_experts}.",
        ),
        (
            config.capacity_factor <= 0,
            f"capacity_factor={config.capacity_factor} leaves no place in any expert.",
            "1.25 is usual; dispatch=dropless needs none.",
        ),
        (
            config.row_bound <= 0,
            f"row_bound={config.row_bound} leaves no room for any row.",
            "2.0 is twice an equal share; leave it out for room for all.",
        ),
        (
            config.load_balancing == "dynamic" and config.routing != "sigmoid",
            f"load_balancing=dynamic moves the bias of sigmoid routing, and routing={config.routing} has none.",
            "use routing=sigmoid, or load_balancing=auxiliary.",
        ),
        (
            dense >= config.num_layers,
            f"num_dense_layers={dense} of num_layers={config.num_layers} leave no layer with experts.",
            "use fewer, or the model gpt.",
        ),
        (
            dense > 0 and config.dense_dim == 0,
            f"num_dense_layers={dense} need a width.",
            f"such as dense_dim={config.expert_dim * (config.top_k + config.num_shared_experts)}.",
        ),
    ]
