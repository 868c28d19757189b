"""A document in a packed sequence is what it is alone; what has no target has no loss."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import piper_jax as piper
from piper_jax.data.packing import packed
from piper_jax.models import gpt, gpt_linen, moe
from piper_jax.models.attention import Packing
from piper_jax.models.gpt_config import gpt_config
from piper_jax.models.moe_config import moe_config

pytestmark = pytest.mark.usefixtures("quick_compiles")

DOCUMENTS = np.random.default_rng(3).integers(0, 256, (3, 7)).astype(np.int32)
BATCH = packed(list(DOCUMENTS), batch_size=1, sequence_length=20)
SIZES: dict[str, Any] = {"preset": "tiny", "num_layers": 2}


def _model(name: str) -> tuple[Any, Any]:
    """``(parameters, (parameters, tokens, packing) -> logits)`` of a tiny model."""
    if name == "gpt_linen":
        linen = gpt_linen.GPT(gpt_config(**SIZES))
        params = jax.jit(gpt_linen.language_model(**SIZES).init)(jax.random.key(0))
        return params, lambda params, tokens, packing: linen.apply({"params": params}, tokens, packing=packing)
    if name == "moe":
        mixture = nnx.jit(lambda: moe.MoE(moe_config(**SIZES, dispatch="dropless"), rngs=nnx.Rngs(0)))()
        graph, params = nnx.split(mixture)
        return params, lambda params, tokens, packing: nnx.merge(graph, params)(tokens, packing)[0]
    graph, params = nnx.split(nnx.jit(lambda: gpt.GPT(gpt_config(**SIZES), rngs=nnx.Rngs(0)))())
    return params, lambda params, tokens, packing: nnx.merge(graph, params)(tokens, packing=packing)


@pytest.mark.parametrize("name", ["gpt", "gpt_linen", "moe"])
def test_packed_logits_are_those_of_each_document_alone(name: str):
    params, logits = _model(name)
    together, alone = jax.jit(
        lambda params: (logits(params, BATCH["tokens"], Packing.of(BATCH)), logits(params, DOCUMENTS[:, :-1], None))
    )(params)
    assert np.isfinite(together).all()
    np.testing.assert_allclose(together[0, :18].reshape(alone.shape), alone, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_mean_over_targets():
    model = gpt.language_model(**SIZES)

    @jax.jit
    def losses(key: jax.Array) -> Any:
        params = model.init(key)
        alone = {"tokens": DOCUMENTS[:, :-1], "targets": DOCUMENTS[:, 1:]}
        return model.loss_fn(params, BATCH), model.loss_fn(params, alone)

    together, alone = losses(jax.random.key(0))
    assert isinstance(together, piper.WeightedLoss)
    assert float(together.weight) == 18
    assert float(together.total) == pytest.approx(18 * float(alone), rel=1e-5)


def test_the_balance_loss_is_beside_the_weighted_one():
    model = moe.language_model(**SIZES, balance_weight=0.5)
    loss, metrics = jax.jit(lambda key: model.loss_fn(model.init(key), BATCH))(jax.random.key(0))
    assert float(loss.extra) == pytest.approx(0.5 * sum(map(float, metrics["balance_loss"])), rel=1e-6)
    assert float(metrics["token_loss"]) == pytest.approx(float(loss.total / loss.weight), rel=1e-6)
