"""What devices send each other around experts, with ``vmap`` over an axis in the place of devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from piper_jax.lowering.token_layouts import Places, Rows, SizesOfRows
from piper_jax.tracing.dispatch import Dispatch
from piper_jax.tracing.local_experts import EXPERT_AXIS

PARTS, LOCAL, ROWS = 2, 3, 12
EXPERTS = PARTS * LOCAL


def exchanged(value: Any) -> Any:
    return jax.lax.all_to_all(value, EXPERT_AXIS, 0, 0)


def on_devices(function: Any, *arrays: Any) -> Any:
    """One entry of dimension 0 for each device."""
    return jax.vmap(function, axis_name=EXPERT_AXIS)(*arrays)


def test_places_go_to_their_experts_and_come_back() -> None:
    layout = Places(Dispatch(place="experts", num_experts=EXPERTS, num_parts=PARTS))
    sent = jnp.arange(PARTS * EXPERTS * 2 * 5.0).reshape(PARTS, EXPERTS, 2, 5)
    there = on_devices(lambda x: layout.at_experts(exchanged(layout.to_experts(x))), sent)
    by_source = sent.reshape(PARTS, PARTS, LOCAL, 2, 5)  # source, device, expert
    np.testing.assert_array_equal(there, by_source.transpose(1, 2, 0, 3, 4))
    back = on_devices(lambda y: layout.at_tokens(exchanged(layout.from_experts(y))), there)
    np.testing.assert_array_equal(back, sent)


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sizes by expert, some of them zero, and rows that name their expert, source and position."""
    random = np.random.default_rng(seed)
    owner = np.sort(random.integers(0, EXPERTS, (PARTS, ROWS)) // 2 * 2, axis=1)
    sizes = np.stack([np.bincount(o, minlength=EXPERTS) for o in owner])
    position = np.broadcast_to(np.arange(ROWS), owner.shape)
    source = np.broadcast_to(np.arange(PARTS)[:, None], owner.shape)
    return sizes.astype(np.int32), np.stack([owner, source, position], -1).astype(np.float32)


def dispatch(bound: int) -> Dispatch:
    return Dispatch(place="experts", num_experts=EXPERTS, num_parts=PARTS, bound=bound, rows=ROWS)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("slack", [0, 2])
def test_rows_lie_by_local_expert_whatever_their_source_and_come_back(seed: int, slack: int) -> None:
    sizes, rows = drawn(seed)
    found = dispatch(min(ROWS, int(sizes.reshape(PARTS, PARTS, LOCAL).sum(-1).max()) + slack))

    def there(own: Any, value: Any) -> tuple[Any, ...]:
        of_sizes = SizesOfRows(found)
        arrived = of_sizes.at_experts(exchanged(of_sizes.to_experts(own)))
        layout = Rows(found, own, arrived)
        placed = layout.at_experts(exchanged(layout.to_experts(value)))
        return arrived.sum(0), placed, layout.at_tokens(exchanged(layout.from_experts(placed))), layout.excess

    totals, placed, back, excess = on_devices(there, jnp.asarray(sizes), jnp.asarray(rows))
    np.testing.assert_array_equal(back, rows)
    assert not excess.any()
    for device in range(PARTS):
        expected = [
            rows[source][rows[source][:, 0] == expert]
            for expert in range(device * LOCAL, (device + 1) * LOCAL)
            for source in range(PARTS)
        ]
        filled = np.concatenate(expected)
        assert int(totals[device].sum()) == len(filled)
        np.testing.assert_array_equal(placed[device, : len(filled)], filled)
        assert not placed[device, len(filled) :].any()


def test_rows_without_room_are_counted_and_poison_what_is_sent() -> None:
    sizes = jnp.array([[7, 0, 0, 5, 0, 0], [2, 0, 0, 10, 0, 0]], jnp.int32)
    excess, sent = on_devices(
        lambda own: (Rows(dispatch(8), own, None).excess, Rows(dispatch(8), own, None).to_experts(jnp.ones((ROWS, 1)))),
        sizes,
    )
    np.testing.assert_array_equal(excess, [0, 2])
    assert np.isfinite(sent[0]).all()
    assert np.isnan(sent[1]).all()
