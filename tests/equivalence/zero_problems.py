"""Models, optimizers and comparisons for ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax import contrib
from oracle import Problem, adamw, assert_steps, momentum
from support_matrix import Cell
from tiny_models import VOCAB, mean_loss, tokens

import piper_jax as piper

ROWS, WIDTH = 288, 5  # rows divide by all microbatches times replicas


# -- models -------------------------------------------------------------------------------------------
class Layers(nnx.Module):
    """Eight or nine square layers between an embedding and a head.

    Args:
      odd: nine layers; leaves of every awkward shape, some without a gradient, one unused, one frozen.
    """

    def __init__(self, *, tied: bool = False, odd: bool = False):
        rngs = nnx.Rngs(1)
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(9 if odd else 8)])
        self.head = None if tied else nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)
        self.odd = odd
        if odd:
            self.scale = nnx.Param(jnp.asarray(1.3))
            self.one = nnx.Param(jnp.asarray([0.7]))
            self.row = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH).reshape(1, WIDTH))
            self.empty = nnx.Param(jnp.zeros(0))
            self.stopped = nnx.Param(jnp.full((WIDTH,), 0.3))
            self.unused = nnx.Param(jnp.ones((3, 7)))
            self.frozen = nnx.BatchStat(jnp.linspace(-1.0, 1.0, WIDTH))

    def __call__(self, x: Any) -> Any:
        x = self.embed(x)
        for i, layer in enumerate(self.layers):
            with piper.annotate("PP"):
                y = layer(x)
                if self.odd and i in (1, 7):
                    y = y * self.scale[...] + self.frozen[...]
                if self.odd and i % 3 == 0:
                    y = y * self.row[...] + jax.lax.stop_gradient(self.stopped[...])
                if self.odd and i == 4:
                    y = y + self.one[...] + self.empty[...].sum()
                x = x + jnp.tanh(y)
        return self.embed.attend(x) if self.head is None else self.head(x)


class Stopped(nnx.Module):
    """Whole buckets without a gradient, on one group and on several.

    The first unit reads a tied leaf alone; a layer and a shared vector lie behind ``stop_gradient``; a leaf is unused.
    """

    def __init__(self) -> None:
        rngs = nnx.Rngs(1)
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])
        self.shared = nnx.Param(jnp.full((WIDTH,), 0.3))
        self.unused = nnx.Param(jnp.ones((5, 7)))

    def __call__(self, x: Any) -> Any:
        with piper.annotate("PP"):
            x = jnp.tanh(self.embed(x))
        for i, layer in enumerate(self.layers):
            with piper.annotate("PP"):
                kernel, bias = layer.kernel[...], layer.bias[...]
                if i == 1:
                    kernel, bias = jax.lax.stop_gradient((kernel, bias))
                x = x + jnp.tanh(x @ kernel + bias) + jax.lax.stop_gradient(self.shared[...])
        return self.embed.attend(x)


# -- optimizers ---------------------------------------------------------------------------------------
def is_matrix(tree: Any) -> Any:
    return jax.tree.map(lambda v: v.ndim > 1, tree)


def frozen_biases(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if "bias" in jax.tree_util.keystr(path) else "trained", tree
    )


def clipped(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), inner)


def optimizer(name: str) -> optax.GradientTransformation:
    """Epsilons are far above rounding noise, and lion's steps tiny, so that equal gradients mean equal updates."""
    match name:
        case "adamw":
            return adamw()
        case "momentum":
            return momentum()
        case "adafactor":
            return optax.adafactor(1e-2, min_dim_size_to_factor=4, multiply_by_parameter_scale=False)
        case "lion":
            return optax.lion(1e-6, weight_decay=0.0)
        case "muon":
            return contrib.muon(1e-2, ns_steps=1, eps=1e-2)
        case "decayed kernels":
            decay = optax.masked(optax.add_decayed_weights(0.1), is_matrix)
            return optax.chain(optax.scale_by_adam(eps=1e-2), decay, optax.scale_by_learning_rate(2e-2))
        case "partly frozen":
            trained = clipped(optax.adam(2e-2, eps=1e-2))
            return optax.multi_transform({"frozen": optax.set_to_zero(), "trained": trained}, frozen_biases)
        case "accumulated":
            return optax.MultiSteps(clipped(optax.sgd(0.2, momentum=0.9)), 2)
        case "finite only":
            return optax.apply_if_finite(optax.adam(2e-2, eps=1e-2), max_consecutive_errors=3)
        case "lamb":
            return optax.lamb(1e-2, eps=1e-2)
    raise ValueError(name)


@cache
def problem(model: str, name: str, loss: Callable[..., Any] = mean_loss) -> Problem:
    built = Stopped() if model == "stopped" else Layers(tied=model == "tied", odd=model == "odd")
    return Problem(loss_fn=loss, params=built, batch=tokens(ROWS), optimizer=optimizer(name), steps=2)


# -- strategies ---------------------------------------------------------------------------------------
COLLECTIVES: dict[str, dict[str, Any]] = {
    "separate": {},
    "joined": {"bucket_bytes": 300},
    "overlapped": {"communication_overlap": True, "gather_distance": 2},
    "spans": {"reduce_every": 3, "gather_distance": 0},
}
"""Spans of three microbatches divide none of the numbers of microbatches but three."""
SINCE = {"reduce_every": 2, "gather_distance": 3}
"""The stage of ZeRO from which an option means something."""


def strategy(
    zero: int,
    schedule: str = "1F1B",
    *,
    stages: int = 2,
    data: int = 2,
    microbatches: int = 4,
    remat: bool = False,
    **options: Any,
) -> piper.Strategy:
    named = {"memory_optimization": "activation_checkpointing"} if remat else {}
    known = {name: value for name, value in options.items() if zero >= SINCE.get(name, 1)}
    return piper.Strategy(
        pipeline_parallel=stages, data_parallel=data, num_microbatches=microbatches,
        directives=(piper.directive(schedule, **named), *((piper.directive(f"ZeRO-{zero}", **known),) if zero else ())),
    )  # fmt: skip


def of_cell(cell: Cell) -> piper.Strategy:
    layout = {"stages": cell.stages, "data": cell.data, "microbatches": cell.microbatches, "remat": cell.remat}
    return strategy(cell.zero, cell.schedule, **layout, **COLLECTIVES[cell.collectives])


# -- copies -------------------------------------------------------------------------------------------
def assert_copies_are_equal(train: piper.Train, state: Any) -> None:
    """Every copy of a parameter or moment is the same bit for bit: on all devices of a group, and on all owners."""
    first: dict[Any, bytes] = {}
    for key, array in train._state_layout.registers(state, "step").items():
        if key.layout == "replicated" and not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            for shard in array.addressable_shards:
                copy = np.asarray(shard.data).tobytes()
                assert copy == first.setdefault((key.kind, key.item), copy), f"{key} differs on {shard.device}"


def assert_steps_and_copies(problem: Problem, train: piper.Train) -> None:
    replicas = len(next(iter(train.plan.groups.values())).devices)
    expected = problem.reference(train.plan.num_microbatches, replicas)
    assert_steps(problem, train, expected, after_step=assert_copies_are_equal)
