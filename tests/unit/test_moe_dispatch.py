"""Routing and dispatch alone: places, drops, idle experts, and both dispatches against a dense computation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_jax.models.balance import balance_loss, expert_load
from piper_jax.models.capacity_dispatch import combined, dispatched, dropped_fraction, expert_capacity, places
from piper_jax.models.dropless_dispatch import expert_order, sorted_tokens, unsorted
from piper_jax.models.experts import Experts
from piper_jax.models.mixture import Mixture
from piper_jax.models.moe_config import MoEConfig, moe_config
from piper_jax.models.routing import Routes, sigmoid_routes, softmax_routes

pytestmark = pytest.mark.usefixtures("quick_compiles")

DIM = 8
SCORES = jax.random.normal(jax.random.key(3), (24, 4))


def config(**changes: Any) -> MoEConfig:
    return moe_config(preset="tiny", dim=DIM, expert_dim=6, **changes)


def dense(experts: Experts, x: jax.Array, routes: Routes) -> jax.Array:
    """Every expert on every token, then the chosen ones by a one-hot product."""
    every = experts(jnp.broadcast_to(x, (experts.gate.shape[0], *x.shape)))
    chosen = jax.nn.one_hot(routes.experts, experts.gate.shape[0]) * routes.weights[..., None]
    return jnp.einsum("tke,etd->td", chosen, every)


# -- routing ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("route", [softmax_routes, lambda s, k: sigmoid_routes(s, jnp.zeros(4), k)])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_weights_are_those_of_the_best_and_add_up_to_one(route: Any, top_k: int):
    routes = route(SCORES, top_k)
    np.testing.assert_array_equal(routes.experts, np.argsort(-SCORES, axis=-1)[:, :top_k])
    np.testing.assert_allclose(routes.weights.sum(-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(routes.probabilities.sum(-1), 1.0, rtol=1e-6)
    assert (np.diff(routes.weights) <= 0).all()


def test_softmax_weights_are_the_softmax_of_the_chosen():
    routes = softmax_routes(SCORES, 2)
    chosen = jnp.take_along_axis(SCORES, routes.experts, axis=-1)
    np.testing.assert_allclose(routes.weights, jax.nn.softmax(chosen), rtol=1e-5)


def test_a_bias_changes_the_choice_and_not_the_weights():
    plain, biased = (sigmoid_routes(SCORES, jnp.zeros(4).at[2].set(b), 2) for b in (0.0, 5.0))
    assert (biased.experts[:, 0] == 2).all()
    both = (jnp.sort(plain.experts) == jnp.sort(biased.experts)).all(-1)
    assert 0 < both.sum() < len(both)
    np.testing.assert_allclose(jnp.sort(plain.weights[both]), jnp.sort(biased.weights[both]), rtol=1e-6)
    np.testing.assert_array_equal(plain.probabilities, biased.probabilities)
    gradient = jax.grad(lambda b: sigmoid_routes(SCORES, b, 2).weights[:, 0].sum())(jnp.zeros(4))
    np.testing.assert_array_equal(gradient, 0.0)


# -- capacity -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sizes", "capacity"), [((16, 4, 2, 1.0), 8), ((16, 4, 2, 1.25), 10), ((10, 4, 1, 1.0), 3), ((1, 64, 1, 1.0), 1)]
)
def test_capacity_is_an_equal_share_times_the_factor(sizes: tuple[int, int, int, float], capacity: int):
    assert expert_capacity(*sizes) == capacity


def test_tokens_are_placed_in_their_order_each_with_all_its_choices():
    experts = jnp.array([[0, 1], [1, 0], [0, 1], [0, 2]])
    np.testing.assert_array_equal(places(experts, 3, 3), [[0, 3], [4, 1], [2, 5], [9, 6]])
    np.testing.assert_array_equal(places(experts, 3, 1), [[0, 1], [3, 3], [3, 3], [3, 2]])


def test_dropped_choices_are_counted_and_add_nothing():
    experts = jnp.array([[0], [0], [0], [1]])
    place = places(experts, 2, 2)
    assert float(dropped_fraction(place, 2, 2)) == 0.25
    x = jnp.arange(1.0, 5.0)[:, None] * jnp.ones(DIM)
    rows = dispatched(x, place, 2, 2)
    np.testing.assert_array_equal(rows[..., 0], [[1, 2], [4, 0]])
    np.testing.assert_array_equal(combined(rows, place, jnp.full((4, 1), 0.5))[:, 0], [0.5, 1.0, 0.0, 2.0])


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 99), capacity=st.integers(1, 12), top_k=st.integers(1, 3))
def test_no_place_is_given_twice_and_full_experts_alone_drop(seed: int, capacity: int, top_k: int):
    experts = softmax_routes(jax.random.normal(jax.random.key(seed), (12, 4)), top_k).experts
    place = np.asarray(places(experts, 4, capacity))
    kept = place[place < 4 * capacity]
    assert len(set(kept.tolist())) == len(kept)
    np.testing.assert_array_equal((place // capacity)[place < 4 * capacity], np.asarray(experts)[place < 4 * capacity])
    expected = np.minimum(np.bincount(np.asarray(experts).ravel(), minlength=4), capacity)
    np.testing.assert_array_equal(np.bincount(kept // capacity, minlength=4), expected)


# -- both against a dense computation ---------------------------------------------------------------------
@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("dispatch", ["capacity", "dropless"])
def test_results_and_gradients_are_those_of_all_experts_on_all_tokens(dispatch: str, idle: bool):
    experts = Experts(config(), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (24, DIM))
    scores = SCORES.at[:, 1].add(-50.0) if idle else SCORES
    graph, state = nnx.split(experts)

    def sparse(state: Any, x: jax.Array, scores: jax.Array) -> jax.Array:
        module, routes = nnx.merge(graph, state), softmax_routes(scores, 2)
        if dispatch == "dropless":
            order, sizes = expert_order(routes.experts), expert_load(routes.experts, 4)
            return unsorted(module.ragged(sorted_tokens(x, order, 2), sizes), order, routes.weights)
        place = places(routes.experts, 4, 24)
        return combined(module(dispatched(x, place, 4, 24)), place, routes.weights)

    def whole(state: Any, x: jax.Array, scores: jax.Array) -> jax.Array:
        return dense(nnx.merge(graph, state), x, softmax_routes(scores, 2))

    mix = jnp.cos(jnp.arange(DIM))
    found, expected = (
        jax.jit(jax.value_and_grad(lambda *a, f=f: (f(*a) * mix).sum() * 1e3, (0, 1, 2)))(state, x, scores)
        for f in (sparse, whole)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5 * float(jnp.abs(b).max()) + 1e-9)
    idle_gradient = float(jnp.abs(found[1][0]["gate"][...][1]).max())
    assert (idle_gradient == 0.0) == idle


@pytest.mark.parametrize("changes", [{"dispatch": "dropless"}, {"capacity_factor": 0.5}], ids=str)
def test_a_mixture_whose_tokens_all_choose_the_same_is_finite(changes: dict[str, Any]):
    mixture = Mixture(config(**changes), rngs=nnx.Rngs(0))
    mixture.router.scores.kernel[...] = jnp.zeros((DIM, 4)).at[0].set(jnp.array([0.0, 9.0, 5.0, 0.0]))
    x = jax.random.uniform(jax.random.key(1), (2, 6, DIM), minval=1.0)
    y, statistics = jax.jit(lambda m, x: m(x))(mixture, x)
    np.testing.assert_array_equal(statistics["expert_load"].value, [0, 12, 12, 0])
    if "capacity_factor" in changes:  # three places each
        assert float(statistics["dropped_fraction"]) == pytest.approx(18 / 24)
        assert (np.asarray(y).reshape(12, DIM)[3:] == 0).all()
    gradients = nnx.jit(nnx.grad(lambda m: (m(x)[0] ** 2).sum() + m(x)[1]["balance_loss"]))(mixture)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


# -- balance ------------------------------------------------------------------------------------------------
def test_the_balance_loss_is_one_where_experts_are_used_alike_and_grows_to_their_number():
    even = Routes(jnp.array([[0], [1], [2], [3]]), jnp.ones((4, 1)), jnp.full((4, 4), 0.25))
    assert float(balance_loss(even, expert_load(even.experts, 4))) == pytest.approx(1.0)
    one = Routes(jnp.zeros((4, 1), int), jnp.ones((4, 1)), jnp.zeros((4, 4)).at[:, 0].set(1.0))
    assert float(balance_loss(one, expert_load(one.experts, 4))) == pytest.approx(4.0)


def test_its_gradient_lowers_the_scores_of_busy_experts():
    scores = jnp.zeros((8, 4)).at[:, 2].set(1.0)

    def loss(scores: jax.Array) -> jax.Array:
        routes = softmax_routes(scores, 1)
        return balance_loss(routes, expert_load(routes.experts, 4))

    gradient = jax.grad(loss)(scores)
    assert (gradient[:, 2] > 0).all()
    assert (gradient[:, jnp.array([0, 1, 3])] < 0).all()
