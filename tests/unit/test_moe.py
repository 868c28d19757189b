"""The mixture-of-experts decoder: sizes, causality, losses and dtypes, what its configuration refuses."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from piper_jax.errors import ConfigError
from piper_jax.models import moe
from piper_jax.models.attention import causal_attention
from piper_jax.models.grouped_attention import GroupedAttention
from piper_jax.models.moe_config import PRESETS, moe_config
from piper_jax.models.routing import RoutingBias, balanced_bias

pytestmark = pytest.mark.usefixtures("quick_compiles")

TINY = ["tiny", "deepseek_tiny"]
TOKENS = jax.random.randint(jax.random.key(7), (2, 12), 0, 256)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


@cache
def _made(**arguments: Any) -> Any:
    """A model of two layers with random kernels, drawn by NumPy, as compiling ``init`` costs more than a test."""
    model, random = moe.language_model(**{"num_layers": 2, **arguments}), np.random.default_rng(0)

    def drawn(shape: jax.ShapeDtypeStruct) -> jax.Array:
        scale = 0.0 if len(shape.shape) > 1 else 1.0
        return jnp.asarray(scale + 0.02 * random.standard_normal(shape.shape), shape.dtype)

    return model, jax.tree.map(drawn, model.shapes())


def _called(module: moe.MoE, tokens: jax.Array = TOKENS) -> Any:
    return jax.jit(lambda m, t: m(t))(module, tokens)


def _loss(model: Any, module: moe.MoE) -> Any:
    return jax.jit(model.loss_fn)(module, BATCH)


# -- sizes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_are_counted_without_making_them(preset: str):
    shapes = nnx.state(moe.language_model(preset=preset).shapes(), nnx.Param)
    leaves = jax.tree.leaves(shapes)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert sum(math.prod(leaf.shape) for leaf in leaves) == PRESETS[preset].num_parameters


@pytest.mark.parametrize(
    "changes", [{"tied_embeddings": True}, {"num_shared_experts": 2}, {"num_dense_layers": 1, "dense_dim": 24}]
)
def test_options_are_counted(changes: dict[str, Any]):
    shapes = nnx.state(moe.language_model(preset="tiny", **changes).shapes(), nnx.Param)
    sizes = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert sizes == moe_config(preset="tiny", **changes).num_parameters


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [("9M", 8.8e6, 5.3e6), ("1B", 1.1e9, 0.76e9), ("9B", 9.4e9, 3.0e9), ("deepseek_16B", 16.4e9, 2.8e9)],
)
def test_presets_have_the_sizes_of_their_names(preset: str, total: float, active: float):
    """16.4 and 2.8 billion are what arXiv 2401.06066 says of DeepSeekMoE 16B."""
    assert PRESETS[preset].num_parameters == pytest.approx(total, rel=0.02)
    assert PRESETS[preset].num_active_parameters == pytest.approx(active, rel=0.02)


def test_the_formula_of_the_1b_model_by_hand():
    embeddings, attention = 2 * 151_936 * 1024, 1024 * (2048 + 1024 + 1024) + 2048 * 1024
    experts, norms = 4 * 3 * 1024 * 3584 + 4 * 1024, 2 * 1024 + 2 * 128
    assert PRESETS["1B"].num_parameters == embeddings + 16 * (attention + experts + norms) + 1024


def test_expert_parameters_are_stacked():
    experts = _made(preset="tiny")[1].layers[0].mlp.experts
    assert experts.gate.shape == experts.up.shape == (4, 32, 32)
    assert moe.language_model(preset="9B").shapes().layers[0].mlp.experts.down.shape == (8, 7168, 2048)


# -- what it computes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", [{"dispatch": "dropless"}, {"capacity_factor": 0.75}], ids=str)
@pytest.mark.parametrize("preset", TINY)
def test_a_position_sees_nothing_that_comes_later(preset: str, changes: dict[str, Any]):
    """One sequence, as those of a slice share the places of its experts."""
    _, module = _made(preset=preset, **changes)
    tokens = TOKENS[:1]
    (found, statistics), (expected, _) = _called(module, tokens), _called(module, tokens.at[:, 6:].set(0))
    np.testing.assert_allclose(found[:, :6], expected[:, :6], rtol=1e-4, atol=1e-5)
    assert any(np.asarray(statistics.get("dropped_fraction", [0.0]))) == ("capacity_factor" in changes)


@pytest.mark.parametrize("preset", TINY)
def test_both_dispatches_give_the_same_where_nothing_is_dropped(preset: str):
    _, roomy = _made(preset=preset, capacity_factor=8.0)
    _, dropless = _made(preset=preset, dispatch="dropless")
    (found, statistics), (expected, _) = _called(roomy), _called(dropless)
    assert not any(np.asarray(statistics["dropped_fraction"]))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_first_loss_is_that_of_a_guess_and_the_sum_of_its_named_parts():
    model = moe.language_model(preset="tiny", num_layers=2, balance_weight=0.5)
    module = jax.jit(model.init)(jax.random.key(0))
    loss, metrics = _loss(model, module)
    balance = sum(float(value) for value in metrics["balance_loss"])
    assert float(metrics["token_loss"]) == pytest.approx(math.log(256), abs=0.1)
    assert float(loss) == pytest.approx(float(metrics["token_loss"]) + 0.5 * balance, rel=1e-6)
    assert float(jax.jit(model.evaluation_loss_fn)(module, BATCH)) == pytest.approx(
        float(metrics["token_loss"]), rel=1e-6
    )
    assert len(metrics["balance_loss"]) == 2


def test_without_a_weight_there_is_no_balance_loss():
    model, module = _made(preset="tiny", balance_weight=0.0)
    loss, metrics = _loss(model, module)
    assert set(metrics) == {"token_loss", "expert_load", "dropped_fraction"}
    assert float(loss) == float(metrics["token_loss"])


def test_dense_layers_have_no_statistics():
    _, metrics = _loss(*_made(preset="deepseek_tiny", num_layers=3, load_balancing="auxiliary"))
    assert {name: len(value) for name, value in metrics.items() if name != "token_loss"} == dict.fromkeys(
        ("balance_loss", "dropped_fraction", "expert_load"), 2
    )


def test_the_summary_is_of_all_layers():
    metrics = {
        "token_loss": jnp.float32(2.5),
        "balance_loss": [jnp.float32(1.0), jnp.float32(1.5)],
        "expert_load": [jnp.array([2, 2]), jnp.array([1, 3])],
    }
    assert moe.summary(metrics) == {"tokens": 2.5, "balance": 1.25, "busiest": 1.5}
    assert moe.summary({**metrics, "dropped_fraction": [0.0, 0.5]})["dropped"] == 0.25


def test_a_bias_is_no_parameter_and_only_chooses():
    model, module = _made(preset="deepseek_tiny")
    module = nnx.clone(module)
    router = module.layers[1].mlp.router
    assert isinstance(router.bias, RoutingBias)
    gradients = nnx.jit(nnx.grad(lambda m: model.loss_fn(m, BATCH)[0]))(module)
    assert "bias" not in gradients["layers"][1]["mlp"]["router"]
    router.bias[...] = jnp.zeros(8).at[5].set(9.0)
    load = _called(module)[1]["expert_load"][0].value
    assert int(load[5]) == TOKENS.size


def test_dynamic_balancing_moves_the_bias_towards_idle_experts():
    _, module = _made(preset="deepseek_tiny", bias_rate=0.25)
    router = nnx.clone(module).layers[1].mlp.router
    router.bias[...] = jnp.zeros(8)
    load = jnp.array([0, 1, 2, 2, 2, 2, 3, 4])
    router.observe(load)
    router(jnp.ones((3, 32)))
    np.testing.assert_array_equal(router.bias[...], [0.25, 0.25, 0, 0, 0, 0, -0.25, -0.25])
    np.testing.assert_array_equal(balanced_bias(jnp.zeros(3), jnp.array([1, 2, 2]), 0.5), [0.5, -0.5, -0.5])
    for equal in (jnp.full(2, 3), jnp.full(49, 7), jnp.full(6, 2**24 + 1)):
        np.testing.assert_array_equal(balanced_bias(jnp.zeros(equal.size), equal, 0.5), jnp.zeros(equal.size))


# -- attention ----------------------------------------------------------------------------------------------
def test_as_many_keys_as_queries_are_plain_attention():
    config = moe_config(preset="tiny", num_key_value_heads=4, rope_base=10_000.0)
    attention = GroupedAttention(config, rngs=nnx.Rngs(0))
    attention.norm_query = attention.norm_key = lambda x: x
    x = jax.random.normal(jax.random.key(1), (2, 5, 32))
    plain = causal_attention(jnp.concatenate([p(x) for p in (attention.query, attention.key, attention.value)], -1), 4)
    np.testing.assert_allclose(attention(x), attention.out(plain), rtol=1e-5, atol=1e-6)


def test_queries_and_keys_are_normalized():
    attention = GroupedAttention(moe_config(preset="tiny"), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 5, 32))
    expected = attention(x)
    attention.query.kernel[...] = 1000 * attention.query.kernel[...]
    np.testing.assert_allclose(attention(x), expected, rtol=1e-2, atol=1e-3)


# -- dtypes and configuration -------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", [{}, {"dispatch": "dropless"}, {"routing": "sigmoid"}], ids=str)
def test_bfloat16_is_of_compute_alone(changes: dict[str, Any]):
    model, module = _made(preset="tiny", compute_dtype="bfloat16", **changes)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(module, nnx.Param))} == {jnp.dtype("float32")}
    loss, metrics = _loss(model, module)
    assert loss.dtype == metrics["balance_loss"][0].dtype == jnp.float32
    exact, _ = _loss(*_made(preset="tiny", **changes))
    assert float(loss) == pytest.approx(float(exact), rel=1e-2)
    assert float(loss) != float(exact)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "2B"}, "moe: there is no preset '2B'.\nhelp: did you mean"),
        ({"topk": 3}, "moe: there is no argument 'topk'.\nhelp: did you mean 'top_k'?"),
        ({"routing": "hash"}, "moe: routing='hash' has the wrong type.\nhelp: give one of softmax, sigmoid."),
        ({"num_experts": 0}, "moe: num_experts=0 is not positive.\nhelp: use 1, 2, 3, ..."),
        ({"top_k": 5}, "moe: top_k=5, but there are 4 experts.\nhelp: use at most top_k=4."),
        (
            {"num_key_value_heads": 3},
            "moe: num_heads=4 does not divide into num_key_value_heads=3 groups.\nhelp: use num_key_value_heads=2.",
        ),
        ({"head_dim": 7}, "moe: head_dim=7 is odd; rotary positions turn pairs.\nhelp: use head_dim=8."),
        (
            {"capacity_factor": 0.0},
            "moe: capacity_factor=0.0 leaves no place in any expert.\nhelp: 1.25 is usual",
        ),
        (
            {"num_dense_layers": 4, "dense_dim": 8},
            "moe: num_dense_layers=4 of num_layers=4 leave no layer with experts.\nhelp: use fewer, or the model gpt.",
        ),
        ({"num_dense_layers": 1}, "moe: num_dense_layers=1 need a width.\nhelp: such as dense_dim=64."),
        ({"balance_weight": -0.1}, "moe: balance_weight=-0.1 is negative.\nhelp: 0 means none."),
    ],
)
def test_wrong_sizes_are_named(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        moe_config(**{"preset": "tiny", **arguments})
    assert str(caught.value).startswith(message)
