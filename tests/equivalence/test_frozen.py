"""What is not trained: by filters, by masks of the optimizer, adapters on some layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracle import Problem, assert_equivalent, momentum, strategy
from tiny_models import DIM, Tower, cross_entropy, mean_loss, tokens

from piper_jax.tracing.model_state import model_state

LAYOUTS = [
    {"stages": 2, "data": 2, "microbatches": 2, "zero_stage": 1},
    pytest.param({"stages": 4, "data": 2, "microbatches": 4, "schedule": "ZBH1"}, marks=pytest.mark.full),
]


# -- by filters of variables --------------------------------------------------------------------------------
def adapted(*layers: int) -> Tower:
    """A tower with ``nnx.LoRA`` around one linear map of some layers."""
    model, rngs = Tower(), nnx.Rngs(1)
    for k in layers:
        down = model.layers[k].down
        adapter = nnx.LoRA(2 * DIM, 2, DIM, base_module=down, rngs=rngs)
        adapter.lora_b[...] = 0.3 * jax.random.normal(rngs.params(), adapter.lora_b.shape)
        model.layers[k].down = adapter
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_on_some_layers(layout: dict[str, Any]) -> None:
    """No stage below the first of them has a backward; a stage between two passes cotangents on."""
    problem = Problem(loss_fn=mean_loss, params=adapted(1, 3), batch=tokens(16), wrt=nnx.LoRAParam, steps=2)
    train = assert_equivalent(problem, strategy(**layout))
    assert len(jax.tree.leaves(train.gradients(train.init(problem.params), problem.batch))) == 4
    first = next(stage for stage, op in enumerate(train.plan.dag.ops.values()) if 1 in op.units)
    backwards = {n.id.PP for n in train.plan.dag.nodes.values() if n.id.PASS in ("B", "BI", "BW")}
    assert backwards == set(range(first, layout["stages"]))


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_variables_chosen_by_path(layout: dict[str, Any]) -> None:
    """The head and the biases of the blocks; all filters of NNX choose what is trained."""
    wrt = nnx.All(nnx.Param, nnx.Any(nnx.PathContains("head"), nnx.PathContains("bias")))
    problem = Problem(loss_fn=mean_loss, params=Tower(), batch=tokens(16), wrt=wrt, steps=2)
    train = assert_equivalent(problem, strategy(**layout))
    after = train.params(train.step(train.init(problem.params), problem.batch)[0])
    np.testing.assert_array_equal(after.layers[3].up.kernel, problem.params.layers[3].up.kernel)
    assert bool(jnp.any(after.layers[0].up.bias[...] != problem.params.layers[0].up.bias[...]))


# -- leaves of a pytree --------------------------------------------------------------------------------------
def arrays() -> dict[str, Any]:
    """Four layers of a plain dict, two of them with an adapter."""
    keys = iter(jax.random.split(jax.random.key(0), 16))
    shapes = {"kernel": (DIM, DIM), "lora_a": (DIM, 2), "lora_b": (2, DIM)}
    layers = [
        {
            name: 0.3 * jax.random.normal(next(keys), shape)
            for name, shape in shapes.items()
            if k in (1, 3) or name[0] == "k"
        }
        for k in range(4)
    ]
    return {"embed": jax.random.normal(next(keys), (11, DIM)), "layers": layers, "step": 3}


def arrays_loss(params: Any, batch: Any) -> Any:
    x = params["embed"][batch["x"]]
    for layer in params["layers"]:
        low_rank = layer["lora_a"] @ layer["lora_b"] if "lora_a" in layer else 0.0
        x = x + jnp.tanh(x @ (layer["kernel"] + low_rank))
    return cross_entropy(x @ params["embed"].T, batch["y"]).mean()


ADAPTERS = ["layers.1.lora_a", "layers.1.lora_b", "layers.3.lora_a", "layers.3.lora_b"]


@pytest.mark.parametrize(
    ("wrt", "trained"),
    [
        ("*.lora_?", ADAPTERS),
        (("params.layers.1.lora_a", "embed"), ["embed", "layers.1.lora_a"]),
        ("layers.3", ["layers.3.kernel", *ADAPTERS[2:]]),
        ({"embed": True, "layers": [False, False, True, False], "step": True}, ["embed", "layers.2.kernel"]),
    ],
)
def test_leaves_are_chosen_by_path_or_by_a_tree(wrt: Any, trained: list[str]) -> None:
    state = model_state(arrays(), wrt)
    assert [state.leaves[i].path for i in state.trainable] == trained


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_in_plain_arrays(layout: dict[str, Any]) -> None:
    problem = Problem(loss_fn=arrays_loss, params=arrays(), batch=tokens(16), wrt="*.lora_?", steps=2)
    train = assert_equivalent(problem, strategy(**layout))
    state = train.init(problem.params)
    assert sorted({leaf.shape for leaf in jax.tree.leaves(train.opt_state(state)) if leaf.ndim}) == [(2, DIM), (DIM, 2)]
    after = train.params(train.step(state, problem.batch)[0])
    frozen = lambda tree: [tree["embed"], *(layer["kernel"] for layer in tree["layers"])]  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, frozen(after), frozen(problem.params))


# -- by masks of optimizers -----------------------------------------------------------------------------------
def by_part(tree: Any) -> Any:
    """An optimizer for each part of a model: none for the embedding, one for matrices, another for the rest."""

    def part(path: Any, leaf: Any) -> str:
        name = jax.tree_util.keystr(path)
        return "frozen" if "embed" in name else "matrix" if leaf.ndim > 1 else "vector"

    return jax.tree_util.tree_map_with_path(part, tree)


def several() -> optax.GradientTransformation:
    """Two optimizers and none, one global norm of what is trained, weight decay on matrices alone."""
    matrix = optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(2e-2, eps=1e-2))
    parts = {"frozen": optax.set_to_zero(), "matrix": matrix, "vector": momentum()}
    is_matrix = lambda tree: jax.tree.map(lambda v: v.ndim > 1, tree)  # noqa: E731
    return optax.chain(optax.masked(optax.add_decayed_weights(0.1), is_matrix), optax.multi_transform(parts, by_part))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_optimizers_by_mask(layout: dict[str, Any]) -> None:
    problem = Problem(loss_fn=mean_loss, params=Tower(), batch=tokens(16), optimizer=several(), steps=2)
    train = assert_equivalent(problem, strategy(**layout))
    after = train.params(train.step(train.init(problem.params), problem.batch)[0])
    np.testing.assert_array_equal(after.embed.embedding, problem.params.embed.embedding)
