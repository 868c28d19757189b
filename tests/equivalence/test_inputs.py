"""What may be in a batch, and in the parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracle import Problem, assert_equivalent, momentum, strategy, trainable_part
from tiny_models import DIM, Tower, cross_entropy, mean_loss, tokens

import piper_jax as piper


# -- batches ----------------------------------------------------------------------------------------------
class Inputs(NamedTuple):
    """Integers, booleans, floats, half floats, bytes, a scalar for all rows, nested and in a tuple."""

    tokens: Any
    keep: Any
    scale: Any
    rest: dict[str, Any]


def _mixed_loss(model: Any, batch: tuple[Inputs, Any]) -> Any:
    inputs, labels = batch
    x = model.embed(inputs.tokens)
    for index, layer in enumerate(model.layers):
        with piper.annotate("PP"):
            y = layer(x) * inputs.scale[:, None, None]
            x = jnp.where(inputs.keep[..., None], y, x) + inputs.rest["bias"].astype(jnp.float32)[:, None, :]
            x = x * jnp.where(inputs.rest["kind"][:, None, None] == index, 1.5, inputs.rest["temperature"])
    return cross_entropy(model.head(x), labels.astype(jnp.int32)).mean()


def _mixed_batch(rows: int = 24) -> tuple[Inputs, Any]:
    random, drawn = np.random.default_rng(1), tokens(rows)
    inputs = Inputs(
        tokens=drawn["x"], keep=drawn["mask"], scale=random.random(rows, dtype=np.float32),
        rest={
            "bias": jnp.asarray(random.normal(size=(rows, DIM)), jnp.bfloat16),
            "kind": random.integers(0, 4, rows).astype(np.uint8),
            "temperature": 0.75,
            "name": "a static leaf",
        },
    )  # fmt: skip
    return inputs, drawn["y"].astype(np.int64)


def test_inputs_of_many_kinds_used_in_every_stage() -> None:
    problem = Problem(loss_fn=_mixed_loss, params=Tower(), batch=_mixed_batch())
    train = assert_equivalent(problem, strategy(stages=4, data=2, microbatches=4))
    assert all(len(op.batch_inputs) >= 5 for op in train.plan.dag.ops.values())


def test_what_depends_on_no_parameter_is_computed_where_it_is_used_and_not_sent() -> None:
    def loss(model: Any, batch: Any) -> Any:
        x = model.embed(batch["x"])
        positions = jnp.sin(jnp.arange(x.shape[1], dtype=jnp.float32))[:, None] * jnp.ones(DIM)
        mask = jnp.cumsum(batch["mask"], axis=1)[..., None] > 1
        for layer in model.layers:
            with piper.annotate("PP"):
                x = jnp.where(mask, layer(x + positions), x)
        return cross_entropy(model.head(x), batch["y"]).mean()

    problem = Problem(loss_fn=loss, params=Tower(), batch=tokens())
    train = assert_equivalent(problem, strategy(stages=4, microbatches=2))
    sends = [n for n in train.plan.complete().nodes.values() if type(n).__name__ == "Send"]
    assert {len(n.values) for n in sends} == {1}


# -- parameters ---------------------------------------------------------------------------------------------
class Adapted(nnx.Module):
    """Frozen base layers, each with a small trained adapter; a parameter that nothing reads; constants."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.base = Tower()
        self.adapters = nnx.List([nnx.LoRA(DIM, 2, DIM, rngs=rngs) for _ in self.base.layers])
        for adapter in self.adapters:
            adapter.lora_b[...] = 0.3 * jax.random.normal(rngs.params(), adapter.lora_b.shape)
        self.unused = nnx.LoRAParam(jnp.ones((2, 2)))
        self.table = nnx.Variable(jnp.linspace(0.5, 1.0, DIM))

    def __call__(self, x: Any) -> Any:
        x = self.base.embed(x)
        for layer, adapter in zip(self.base.layers, self.adapters, strict=True):
            with piper.annotate("PP"):
                x = layer(x) + adapter(x) * self.table
        return self.base.head(x)


def test_adapters_alone_are_trained() -> None:
    problem = Problem(loss_fn=mean_loss, params=Adapted(), batch=tokens(), wrt=nnx.LoRAParam, optimizer=momentum())
    train = assert_equivalent(problem, strategy(stages=4, data=2, microbatches=4))
    state = train.init(problem.params)
    state, _ = train.step(state, problem.batch)
    after = train.params(state)
    np.testing.assert_array_equal(after.base.embed.embedding, problem.params.base.embed.embedding)
    np.testing.assert_array_equal(after.unused, problem.params.unused)
    assert float(jnp.abs(after.adapters[0].lora_a[...] - problem.params.adapters[0].lora_a[...]).max()) > 0


def _frozen_by_hand(params: Any, batch: Any) -> Any:
    x = jax.lax.stop_gradient(params["embed"])[batch["x"]]
    for index, kernel in enumerate(params["layers"]):
        with piper.annotate("PP"):
            x = x + jnp.tanh(x @ (jax.lax.stop_gradient(kernel) if index == 1 else kernel))
    return cross_entropy(x @ params["head"], batch["y"]).mean()


def _tree() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 6)
    return {
        "embed": jax.random.normal(keys[0], (11, DIM)),
        "layers": [jax.random.normal(k, (DIM, DIM)) * 0.5 for k in keys[1:5]],
        "head": jax.random.normal(keys[5], (DIM, 11)),
        "never read": jnp.ones(3),
        "steps seen": np.int32(5),
        "activation": "tanh",
        "flag": None,
    }


@pytest.mark.parametrize("stages", [1, 4])
def test_frozen_unused_integer_and_static_leaves(stages: int) -> None:
    """A stage whose layer is frozen still passes cotangents on; weight decay still acts where gradients are zero."""
    problem = Problem(loss_fn=_frozen_by_hand, params=_tree(), batch=tokens())
    train = assert_equivalent(problem, strategy(stages=stages, data=2, microbatches=4))
    gradients = train.gradients(train.init(problem.params), problem.batch)
    assert float(jnp.abs(gradients["embed"]).max()) == 0.0
    assert float(jnp.abs(gradients["layers"][1]).max()) == 0.0


def test_a_first_stage_without_any_gradient_has_no_backward() -> None:
    """Everything up to the last layer is frozen: the early stages have nothing to differentiate."""

    def loss(params: Any, batch: Any) -> Any:
        x = params["frozen"]["embed"][batch["x"]]
        for kernel in params["frozen"]["layers"]:
            with piper.annotate("PP"):
                x = jax.lax.stop_gradient(x + jnp.tanh(x @ kernel))
        with piper.annotate("PP"):
            x = x @ params["head"]
        return cross_entropy(x, batch["y"]).mean()

    tree = _tree()
    params = {"frozen": {"embed": tree["embed"], "layers": tree["layers"]}, "head": tree["head"]}
    problem = Problem(loss_fn=loss, params=params, batch=tokens(), optimizer=optax.sgd(0.1))
    train = assert_equivalent(problem, strategy(stages=3, data=2, microbatches=2))
    assert [op.has_backward for op in train.plan.dag.ops.values()] == [False, False, True]


def test_params_come_back_in_the_models_own_layout() -> None:
    tree = _tree()
    train = piper.parallelize(_frozen_by_hand, tree, tokens(), optimizer=momentum(), strategy=strategy(stages=2))
    back = train.params(train.init(tree))
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert (back["activation"], int(back["steps seen"])) == ("tanh", 5)
    assert all(isinstance(v, jax.Array) for v in jax.tree.leaves(trainable_part(back)))
