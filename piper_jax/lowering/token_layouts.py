"""What one device sends to each other device before an all_to_all, and makes of what it gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from piper_jax.tracing.dispatch import Dispatch

UNASSIGNED = 1 << 22


@dataclass(frozen=True, slots=True)
class Places:
    """Places for each expert: ``[experts, ...]`` at the tokens, ``[local experts, sources, ...]`` at the experts."""

    dispatch: Dispatch

    def to_experts(self, value: Any) -> Any:
        return value.reshape(self.dispatch.num_parts, self.dispatch.num_local, *value.shape[1:])

    def at_experts(self, value: Any) -> Any:
        return value.swapaxes(0, 1)

    def from_experts(self, value: Any) -> Any:
        return value.swapaxes(0, 1)

    def at_tokens(self, value: Any) -> Any:
        return value.reshape(self.dispatch.num_experts, *value.shape[2:])


@dataclass(frozen=True, slots=True)
class SizesOfRows:
    """How many rows are of each expert: ``[experts]`` at the tokens, ``[sources, local experts]`` at the experts."""

    dispatch: Dispatch

    def to_experts(self, value: Any) -> Any:
        return value.reshape(self.dispatch.num_parts, self.dispatch.num_local)

    def at_experts(self, value: Any) -> Any:
        return value

    from_experts = at_experts

    def at_tokens(self, value: Any) -> Any:
        return value.reshape(self.dispatch.num_experts)


@dataclass(frozen=True)
class Rows:
    """Rows sorted by expert, ``[rows, ...]``; at the experts all sources' by local expert, ``[sources * bound, ...]``.

    Attributes:
      sizes: of the rows here, by expert.
      arrived: of the rows of each source, by local expert.
    """

    dispatch: Dispatch
    sizes: Any
    arrived: Any

    @property
    def bound(self) -> int:
        assert self.dispatch.bound is not None
        return self.dispatch.bound

    @cached_property
    def _sent(self) -> tuple[Any, Any]:
        """First row that goes to each device, and how many do."""
        count = self.sizes.reshape(self.dispatch.num_parts, -1).sum(1)
        return jnp.cumsum(count) - count, count

    @cached_property
    def excess(self) -> Any:
        """By how many rows what goes to one device is above the bound, or UNASSIGNED and how many are of no expert.

        Nothing is lost where it is 0.
        """
        unassigned = self.dispatch.rows - self.sizes.sum()
        without_room = jnp.maximum(self._sent[1].max() - self.bound, 0)
        return jnp.where(unassigned > 0, UNASSIGNED + unassigned, without_room)

    @cached_property
    def _sorted(self) -> Any:
        """``[sources, bound]``: where each row that arrived lies among those of all sources; far out, if it is none."""
        ends = jnp.cumsum(self.arrived, axis=1)
        position = jnp.arange(self.bound)
        expert = (position[None, :, None] >= ends[:, None, :]).sum(-1)
        flat = self.arrived.T.reshape(-1)
        before = (jnp.cumsum(flat) - flat).reshape(self.arrived.T.shape).T
        known = jnp.minimum(expert, self.dispatch.num_local - 1)
        start = jnp.take_along_axis(before - (ends - self.arrived), known, axis=1)
        return jnp.where(expert < self.dispatch.num_local, start + position, self.dispatch.num_parts * self.bound)

    def to_experts(self, value: Any) -> Any:
        """``[devices, bound, ...]``; all NaN if there are more rows than that, or some of no expert."""
        first, count = self._sent
        position = jnp.arange(self.bound)
        place = jnp.where(position < count[:, None], first[:, None] + position, value.shape[0])
        rows = value.at[place].get(mode="fill", fill_value=0)
        return jnp.where(self.excess > 0, jnp.nan, rows) if jnp.issubdtype(value.dtype, jnp.inexact) else rows

    def at_experts(self, value: Any) -> Any:
        room = jnp.zeros((self.dispatch.num_parts * self.bound, *value.shape[2:]), value.dtype)
        return room.at[self._sorted].set(value, mode="drop")

    def from_experts(self, value: Any) -> Any:
        return value.at[self._sorted].get(mode="fill", fill_value=0)

    def at_tokens(self, value: Any) -> Any:
        first, count = self._sent
        row = jnp.arange(self.dispatch.rows)
        device = (row[:, None] >= (first + count)[None, :]).sum(1)
        known = jnp.minimum(device, self.dispatch.num_parts - 1)
        return value.at[known, row - first[known]].get(mode="fill", fill_value=0)
