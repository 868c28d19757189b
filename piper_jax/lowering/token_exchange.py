"""The all_to_alls around experts: tokens go to the devices of their experts, results back to those of the tokens.

On the way back of a step the same happens to cotangents: what a region gave has its cotangents sent in, and those of
what it took are sent out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Way
from piper_jax.lowering.context import Context
from piper_jax.lowering.fences import after_fence, once_there
from piper_jax.lowering.keys import Key
from piper_jax.lowering.slots import cotangent_keys, dispatched_key, pass_word
from piper_jax.lowering.token_layouts import Places, Rows, SizesOfRows
from piper_jax.tracing.dispatch import Dispatch
from piper_jax.tracing.local_experts import EXPERT_AXIS


@dataclass(frozen=True, slots=True)
class Moving:
    """An all_to_all that was started: what it reads and what it gives."""

    layout: Places | Rows | SizesOfRows
    sent: Sequence[Any]
    moved: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenExchange:
    """One all_to_all node as a function of local arrays.

    Attributes:
      sources: for each array that is written, the keys whose sum it is.
      arrays: what is written, from one of ``sources`` each.
      excess: for rows that enter in a forward pass: the most that found no room are kept there.
      sizes: for rows, the keys of how many are of each expert: here, and of all sources for the experts here.
    """

    context: Context
    group: str
    id: NodeId
    way: Way
    dispatch: Dispatch
    sources: tuple[tuple[Key, ...], ...]
    arrays: tuple[Key, ...]
    sizes: tuple[Key, Key] | None
    excess: Key | None
    chain: str

    @property
    def reads(self) -> tuple[Key, ...]:
        needed = (*(self.sizes or ()), *((self.excess,) if self.excess else ()))
        return tuple(dict.fromkeys((*(k for found in self.sources for k in found), *needed)))

    @property
    def writes(self) -> tuple[Key, ...]:
        return (*self.arrays, self.excess) if self.excess else self.arrays

    @property
    def mb(self) -> int:
        return self.id.MB or 0

    @property
    def word(self) -> str:
        """What the label of a program calls it."""
        return self.way

    def run(self, env: dict[Key, Any]) -> None:
        """Moves its arrays in ONE all_to_all for each dtype, after the collectives before it on its chain."""
        self.end(env, self.start(env))

    def start(self, env: dict[Key, Any]) -> Moving:
        """The all_to_all by itself."""
        values = [env[found[0]] if len(found) == 1 else sum(env[k] for k in found) for found in self.sources]
        layout, fence = self._layout(env), Key("fence", self.group, self.chain)
        with jax.named_scope(pass_word(self.id)):
            packed = [layout.to_experts(v) if self.way == "enter" else layout.from_experts(v) for v in values]
            sent = after_fence(self.context, env, fence, packed)
            moved = _all_to_all(sent)
        env[fence] = moved[0]
        return Moving(layout, sent, moved)

    def end(self, env: dict[Key, Any], moving: Moving, others: Sequence[Any] = ()) -> None:
        """Writes what was moved, once ``others`` are there too."""
        layout = moving.layout
        with jax.named_scope(pass_word(self.id)):
            moved = once_there(self.context, moving.moved, others)
            for key, value in zip(self.arrays, moved, strict=True):
                env[key] = layout.at_experts(value) if self.way == "enter" else layout.at_tokens(value)
        if self.excess is not None and isinstance(layout, Rows):
            env[self.excess] = jnp.maximum(env[self.excess], layout.excess.astype(env[self.excess].dtype))

    def _layout(self, env: Mapping[Key, Any]) -> Places | Rows | SizesOfRows:
        if self.dispatch.bound is None:
            return Places(self.dispatch)
        if self.sizes is None:
            return SizesOfRows(self.dispatch)
        return Rows(self.dispatch, *(env[k] for k in self.sizes))


def _all_to_all(arrays: Sequence[Any]) -> list[Any]:
    """Entry ``p`` of dimension 0 goes to device ``p``; what comes from there takes its place."""
    out: list[Any] = [None] * len(arrays)
    for dtype in dict.fromkeys(a.dtype for a in arrays):
        chosen = [k for k, a in enumerate(arrays) if a.dtype == dtype]
        rows = [arrays[k].reshape(arrays[k].shape[0], -1) for k in chosen]
        moved = jax.lax.all_to_all(rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1), EXPERT_AXIS, 0, 0)
        start = 0
        for k, row in zip(chosen, rows, strict=True):
            out[k] = moved[:, start : start + row.shape[1]].reshape(arrays[k].shape)
            start += row.shape[1]
    return out


def token_exchanges(context: Context) -> dict[NodeId, TokenExchange]:
    """All all_to_alls of a plan."""
    nodes = (n for n in context.dag.nodes.values() if isinstance(n, Collective) and n.kind == "all_to_all")
    return {n.id: _token_exchange(context, n) for n in nodes}


def _token_exchange(context: Context, node: Collective) -> TokenExchange:
    op, way, group = str(node.around), node.way, str(node.group)
    found = context.dispatch_of(op)
    assert found is not None
    assert way is not None
    at, mb, chunk = node.id._replace(op=op), node.id.MB or 0, context.chunk_of[op]
    values = [context.source.values[v.removeprefix("d ")] for v in node.values]
    if node.id.PASS == "F":
        here = [(Key("value", group, v, mb),) for v in values]
        there = [dispatched_key(group, at, v) for v in values]
    else:
        given = [Key("cotangent", group, (v, op), mb) for v in values]
        here = [cotangent_keys(context, group, v, mb) for v in values] if way == "enter" else [(k,) for k in given]
        there = [Key("dispatched_cotangent", group, (v, op), mb) for v in values]
    avals = context.program.flat.avals
    counts = next((v for v in chunk.externals if found.is_sizes(avals[v])), None)
    moves_counts = counts in values
    sizes = (
        None if counts is None or moves_counts else (Key("value", group, counts, mb), dispatched_key(group, at, counts))
    )
    enters = way == "enter"
    return TokenExchange(
        context=context, group=group, id=node.id, way=way, dispatch=found,
        sources=tuple(here) if enters else tuple((k,) for k in there),
        arrays=tuple(there) if enters else tuple(k for (k,) in here), sizes=sizes, chain=context.chain_of(node),
        excess=Key("metric", group, ("excess", op)) if sizes and enters and node.id.PASS == "F" else None,
    )  # fmt: skip
