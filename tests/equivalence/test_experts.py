"""Experts divided over devices: every step is that of one device, and the text holds the all_to_alls of the plan."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracle import Problem, adamw, assert_equivalent, momentum, strategy
from test_hlo import compiled, planned
from test_mixtures import DROPLESS, SIGMOID, SOFTMAX, problem, text
from tolerances import TOLERANCES, assert_close

import piper_jax as piper
from piper_jax.errors import DirectiveError, PlanError, RuntimeFault
from piper_jax.ir.nodes import Collective

FOUR = {"num_layers": 4}
CELLS = [
    (SOFTMAX | {"num_layers": 1}, {"data": 2, "microbatches": 2, "zero_stage": 3, "expert_parallel": 4}),
    (DROPLESS | {"num_layers": 1}, {"data": 2, "microbatches": 1, "zero_stage": 1, "expert_parallel": 2}),
    (SIGMOID, {"stages": 2, "microbatches": 2, "schedule": "ZBH1", "expert_parallel": 2}),
]
WIDE = [
    (SIGMOID, {"data": 4, "microbatches": 1, "zero_stage": 2}),
    (SOFTMAX, {"stages": 2, "data": 2, "microbatches": 3, "zero_stage": 1}),
    (SIGMOID | DROPLESS | FOUR, {"stages": 2, "data": 2, "microbatches": 2, "schedule": "Interleaved1F1B"}),
    (DROPLESS | FOUR, {"stages": 2, "data": 2, "microbatches": 2, "schedule": "Interleaved1F1B", "zero_stage": 3}),
    (SOFTMAX | FOUR, {"stages": 2, "data": 2, "microbatches": 4, "schedule": "DualPipeV", "zero_stage": 2}),
    (SOFTMAX | FOUR, {"stages": 4, "microbatches": 8, "schedule": "DualPipe", "zero_stage": 1}),
    (SIGMOID | FOUR, {"stages": 4, "microbatches": 8, "schedule": "DualPipe", "zero_stage": 3}),
]
DEEP = [
    (DROPLESS, {"stages": 2, "microbatches": 2, "schedule": "ZBH1", "zero_stage": 2}),
    (DROPLESS | FOUR, {"stages": 2, "microbatches": 4, "schedule": "DualPipeV"}),
]
MORE = [*((c, {**k, "expert_parallel": 2}) for c, k in WIDE), *((c, {**k, "expert_parallel": 4}) for c, k in DEEP)]


def _name(value: Any) -> str:
    return "-".join(str(v) for v in value.values()) or "softmax"


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        *(pytest.param(*cell, marks=() if number else pytest.mark.sample) for number, cell in enumerate(CELLS)),
        *(pytest.param(*cell, marks=pytest.mark.full) for cell in MORE),
    ],
    ids=_name,
)
def test_a_step_is_that_of_one_device(changes: dict[str, Any], layout: dict[str, Any]) -> None:
    tested = problem(changes)
    train = assert_equivalent(tested, strategy(**layout))
    assert sum((found for _, found in compiled(train)), Counter()) == planned(train)


def _exchanges(found: Problem, chosen: piper.Strategy) -> Counter[tuple[str, str]]:
    """Planned all_to_alls by pass and, whether of sizes or of tokens, name."""
    plan = piper.trace(found.loss_fn, found.params, found.batch, optimizer=found.optimizer).apply(chosen)
    nodes = (n for n in plan.complete().nodes.values() if isinstance(n, Collective) and n.kind == "all_to_all")
    return Counter((str(n.id.PASS), " ".join(n.id.op.split()[:-1])) for n in nodes)


def test_a_layer_exchanges_its_tokens_twice_in_each_direction() -> None:
    """BW has none, and dropless experts one more of how many rows there are."""
    chosen = strategy(expert_parallel=2, microbatches=1, schedule="ZBH1")
    tokens = {("F", "all_to_all enter"): 1, ("F", "all_to_all leave"): 1}
    back = {("BI", "all_to_all enter"): 1, ("BI", "all_to_all leave"): 1}
    assert _exchanges(problem({"num_layers": 1}), chosen) == tokens | back
    sizes = {("F", "all_to_all sizes enter"): 1}
    assert _exchanges(problem({"num_layers": 1} | DROPLESS), chosen) == tokens | back | sizes


# -- other models, other optimizers -------------------------------------------------------------------
class Small(nnx.Module):
    """Experts of another make: a mask, a bias, relu, and parameters cast outside of the region."""

    def __init__(self, apply: Any = None):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.router = nnx.Linear(8, 4, rngs=rngs)
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(1), (4, 8, 8)))
        self.bias = nnx.Param(jax.random.normal(jax.random.key(2), (4, 8)))
        self.head = nnx.Linear(8, 11, rngs=rngs)
        self.apply = apply or masked

    def __call__(self, tokens: jax.Array) -> jax.Array:
        with piper.annotate("PP"):
            x = self.embed(tokens).reshape(-1, 8)
            gates = jax.nn.softmax(self.router(x))
            kernel = self.kernel[...] * 0.5
            everywhere = jnp.broadcast_to(x, (4, *x.shape))
            y = piper.expert_region(lambda z: self.apply(z, kernel, self.bias[...]))(everywhere)
            return self.head(x + jnp.einsum("te,etd->td", gates, y)).reshape(*tokens.shape, 11)


def masked(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    y = jax.nn.relu(jnp.einsum("ecd,edf->ecf", x, kernel) + bias[:, None])
    return jnp.where(jnp.arange(4)[:, None, None] == 2, -y, y) - y.mean(-1, keepdims=True)


def small_loss(model: Small, batch: Any) -> jax.Array:
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def small(optimizer: Any = None, apply: Any = None, rows: int = 8) -> Problem:
    return Problem(loss_fn=small_loss, params=Small(apply), batch=text(rows), optimizer=optimizer or adamw())


def test_what_does_not_come_from_an_expert_is_cut_where_it_meets_one() -> None:
    assert_equivalent(small(), strategy(expert_parallel=2, data=2, microbatches=1, zero_stage=2))


def test_optimizers_that_mask_leaves_follow_the_experts() -> None:
    masks = optax.chain(
        optax.add_decayed_weights(0.1, mask=lambda p: jax.tree.map(lambda v: v.ndim > 2, p)), momentum()
    )
    assert_equivalent(small(masks), strategy(expert_parallel=4, microbatches=1))


@pytest.mark.parametrize(
    ("apply", "said"),
    [
        (lambda x, k, b: jnp.einsum("ecd,edf->ecf", x, k) + x.sum(0), "reduce_sum"),
        (lambda x, k, b: jnp.einsum("ecd,edf->ecf", x, k)[::-1], "rev"),
        (lambda x, k, b: jnp.cumsum(jnp.einsum("ecd,edf->ecf", x, k), 0), "cumsum"),
        (lambda x, k, b: jnp.einsum("ecd,edf->cf", x, k) + x, "dot_general"),
        (lambda x, k, b: (x.reshape(-1, 8) @ k[0]).reshape(x.shape), "reshape"),
    ],
)
def test_what_mixes_experts_is_refused_before_compiling(apply: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        small(apply=apply).parallelize(strategy(expert_parallel=2, microbatches=1))


def test_experts_that_do_not_divide_are_refused() -> None:
    tested = small(rows=6)
    with pytest.raises(PlanError, match=r"4 experts .* cannot be divided over the 3 devices"):
        tested.parallelize(strategy(expert_parallel=3, microbatches=1))


def test_a_model_without_experts_has_no_expert_axis() -> None:
    def plain(model: Small, batch: Any) -> jax.Array:
        return (model.head(model.embed(batch["tokens"])) ** 2).mean()

    with pytest.raises(DirectiveError, match="no expert region"):
        piper.parallelize(plain, Small(), text(), optimizer=adamw(), strategy=strategy(expert_parallel=2))


def test_an_optimizer_that_mixes_the_elements_of_experts_is_refused() -> None:
    factored = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    with pytest.raises(PlanError, match="element by element"):
        small(factored).parallelize(strategy(expert_parallel=2, microbatches=1))


# -- too many rows for a device; evaluation; one node alone ---------------------------------------------
def test_rows_without_room_are_an_error_and_nothing_is_dropped() -> None:
    tested = problem(DROPLESS | {"num_layers": 1, "row_bound": 0.5})
    train = tested.parallelize(strategy(expert_parallel=2, microbatches=2))
    state, metrics = train.step(train.init(tested.params), tested.batch)
    assert np.isnan(float(metrics["loss"]))
    with pytest.raises(RuntimeFault, match=r"layers.0.mlp.experts.*\n.*row_bound=") as error:
        train.params(state)
    bound = float(str(error.value).partition("row_bound=")[2].split()[0])
    enough = problem(DROPLESS | {"num_layers": 1, "row_bound": bound})
    assert_equivalent(enough, strategy(expert_parallel=2, microbatches=2))


class Ragged(nnx.Module):
    """Rows of experts beside other integers; ``cover`` says whether all rows are of some expert."""

    def __init__(self, *, cover: bool = True):
        keys = jax.random.split(jax.random.key(0), 3)
        self.router = nnx.Param(jax.random.normal(keys[0], (8, 4)))
        self.kernel = nnx.Param(jax.random.normal(keys[1], (4, 8, 8)))
        self.dense = nnx.Param(jax.random.normal(keys[2], (8, 8)))
        self.cover = cover

    def __call__(self, x: jax.Array) -> jax.Array:
        with piper.annotate("PP"):
            x = x @ self.dense[...]
            chosen = jnp.argmax(x @ self.router[...], -1)
            order = jnp.argsort(chosen)
            sizes = jnp.bincount(chosen, length=4).astype(jnp.int32)
            sizes = sizes if self.cover else sizes.at[-1].set(0)
            kernel = self.kernel[...]

            def experts(kinds: jax.Array, rows: jax.Array, sizes: jax.Array) -> jax.Array:
                return rows + jax.lax.ragged_dot(rows * (1 + kinds[:, None]), kernel, sizes)

            return piper.expert_region(experts, row_bound=2.0)(order % 3, x[order], sizes)[jnp.argsort(order)]


def ragged(**options: bool) -> Problem:
    x = jax.random.normal(jax.random.key(1), (32, 8))
    return Problem(
        loss_fn=lambda model, batch: (model(batch["x"]) ** 2).mean(), params=Ragged(**options), batch={"x": x}, steps=1
    )


def test_integers_of_rows_are_no_sizes_and_rows_of_no_expert_an_error() -> None:
    assert_equivalent(ragged(), strategy(expert_parallel=2, microbatches=1))
    tested = ragged(cover=False)
    train = tested.parallelize(strategy(expert_parallel=2, microbatches=1))
    state, metrics = train.step(train.init(tested.params), tested.batch)
    assert np.isnan(metrics["loss"])
    with pytest.raises(RuntimeFault, match="of a slice belong to no expert of"):
        train.opt_state(state)


def test_evaluation_and_single_nodes_have_the_same_experts() -> None:
    tested = problem(SOFTMAX | {"num_layers": 1})
    train = tested.parallelize(strategy(expert_parallel=2, data=2, microbatches=1))
    state = train.init(tested.params)
    again = train.evaluate(state, tested.batch, loss_fn=lambda model, batch: tested.loss_fn(model, batch)[0])
    assert float(again["loss"]) == pytest.approx(float(train.evaluate(state, tested.batch)["loss"]), rel=1e-6)
    assert train.bisect(state, tested.batch) is None
    for node in ("F[PP=0,EP=0,MB=0]", "B[PP=0,EP=0,MB=0]"):
        assert train.run_node(node, state, tested.batch).difference < 2e-5
    given = train.params(state)
    assert_close(nnx.state(given, nnx.Param), nnx.state(tested.params, nnx.Param), TOLERANCES["float64"], "parameter")
