"""The example models: sizes, causality, dropout, dtypes, and that NNX and Linen compute the same."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from piper_jax.errors import ConfigError
from piper_jax.models import gpt, gpt_linen
from piper_jax.models.attention import causal_attention, rotary
from piper_jax.models.gpt_config import gpt_config
from piper_jax.models.language_model import token_loss

MODELS = pytest.mark.parametrize("api", [gpt, gpt_linen], ids=["nnx", "linen"])
TOKENS = jax.random.randint(jax.random.key(7), (2, 12), 0, 256)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


def _leaves(params: Any) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(params, nnx.Param) if isinstance(params, nnx.Module) else params)


@MODELS
@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": True}, {"mlp_dim": 48}, {"num_layers": 2}])
def test_parameters_are_counted(api: ModuleType, changes: dict[str, Any]):
    model = api.language_model(preset="tiny", **changes)
    sizes = sum(leaf.size for leaf in _leaves(model.init(jax.random.key(0))))
    assert sizes == gpt_config(preset="tiny", **changes).num_parameters


@MODELS
def test_the_first_loss_is_that_of_a_guess(api: ModuleType):
    model = api.language_model(preset="tiny")
    assert float(model.loss_fn(model.init(jax.random.key(0)), BATCH)) == pytest.approx(math.log(256), abs=0.1)


@MODELS
def test_shapes_are_those_of_the_parameters(api: ModuleType):
    model = api.language_model(preset="tiny")
    made, known = _leaves(model.init(jax.random.key(0))), _leaves(model.shapes())
    assert [(a.shape, a.dtype) for a in made] == [(s.shape, s.dtype) for s in known]


def test_a_position_sees_nothing_that_comes_later():
    model = gpt.GPT(gpt_config(preset="tiny"), rngs=nnx.Rngs(0))
    changed = TOKENS.at[:, 6:].set(0)
    np.testing.assert_allclose(model(TOKENS)[:, :6], model(changed)[:, :6], rtol=1e-5, atol=1e-6)


def test_rotary_positions_are_relative():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 2, 8))
    rows = [rotary(jnp.broadcast_to(x, (1, 6, 2, 8))) for x in (query, key)]
    scores = jnp.einsum("bqhd,bkhd->qk", *rows)
    np.testing.assert_allclose(scores[3, 1], scores[5, 3], rtol=1e-5)


def test_attention_of_the_first_position_is_its_value():
    qkv = jax.random.normal(jax.random.key(0), (2, 5, 24))
    np.testing.assert_allclose(causal_attention(qkv, 2)[:, 0], qkv[:, 0, 16:], rtol=1e-6)


@MODELS
def test_dropout_is_a_function_of_the_key(api: ModuleType):
    model = api.language_model(preset="tiny", dropout=0.5)
    params = model.init(jax.random.key(0))
    one, same, other = (float(model.loss_fn(params, BATCH, jax.random.key(k))) for k in (1, 1, 2))
    assert one == same != other
    plain = api.language_model(preset="tiny")
    assert plain.evaluation_loss_fn is None
    assert float(model.evaluation_loss_fn(params, BATCH)) == pytest.approx(float(plain.loss_fn(params, BATCH)))


@MODELS
def test_bfloat16_is_of_compute_alone(api: ModuleType):
    model = api.language_model(preset="tiny", compute_dtype="bfloat16")
    params = model.init(jax.random.key(0))
    assert {leaf.dtype for leaf in _leaves(params)} == {jnp.dtype("float32")}
    loss = model.loss_fn(params, BATCH)
    assert loss.dtype == jnp.float32
    wide = api.language_model(preset="tiny")
    exact = wide.loss_fn(wide.init(jax.random.key(0)), BATCH)
    assert float(loss) == pytest.approx(float(exact), rel=1e-2)
    assert float(loss) != float(exact)


def test_the_loss_of_narrow_logits_is_computed_in_float32():
    assert (
        token_loss(jnp.zeros((1, 2, 256), jnp.bfloat16), {"targets": jnp.zeros((1, 2), jnp.int32)}).dtype == jnp.float32
    )


@pytest.mark.parametrize("tied", [False, True])
def test_nnx_and_linen_compute_the_same(tied: bool):
    linen = gpt_linen.language_model(preset="tiny", tied_embeddings=tied)
    params = linen.init(jax.random.key(0))
    module = gpt.GPT(gpt_config(preset="tiny", tied_embeddings=tied), rngs=nnx.Rngs(1))
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        names = [str(name) for name in path]
        if names[0] == "layers":
            names[:2] = [f"layers_{names[1]}"]
        value = params
        for name in names:
            value = value[name]
        variable[...] = value
    found, expected = gpt.loss_fn(module, BATCH), linen.loss_fn(params, BATCH)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "huge"}, "gpt: there is no preset 'huge'.\nhelp: known: demo, small, tiny"),
        ({"num_layer": 3}, "gpt: there is no argument 'num_layer'.\nhelp: did you mean 'num_layers'?"),
        ({"dim": "64"}, "gpt: dim='64' has the wrong type.\nhelp: give a value of type int."),
        ({"dim": 50}, "gpt: dim=50 does not divide into 2 heads of even width.\nhelp: use dim=52, or fewer heads."),
        ({"num_layers": 0}, "gpt: num_layers=0 is not positive.\nhelp: use 1, 2, 3, ..."),
        ({"dropout": 1.0}, "gpt: dropout=1.0 is not in [0, 1).\nhelp: 0.1 is usual."),
        ({"mlp_dim": -1}, "gpt: mlp_dim=-1 is negative.\nhelp: 0 means 4 * dim."),
    ],
)  # fmt: skip
def test_wrong_sizes_are_named(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        gpt_config(**arguments)
    assert str(caught.value) == message
