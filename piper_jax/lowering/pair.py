"""A program of two passes: beside each exchange of one, between its start and its end, are products of the other.

XLA asks whether an exchange is covered, not by what. So its order and a piece of the other pass are tied by data::

    what is sent --> products of the piece --> what reads what was moved
    what was moved --> what reads the last of these products

What remains free is when the exchange starts, which XLA does early enough, and what needs neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from piper_jax.lowering.collectives import StateCollective
from piper_jax.lowering.context import Context
from piper_jax.lowering.fences import once_there
from piper_jax.lowering.keys import Key
from piper_jax.lowering.slots import Step
from piper_jax.lowering.token_exchange import Moving, TokenExchange
from piper_jax.lowering.turns import Turn, turns
from piper_jax.tracing.costs import product_flops
from piper_jax.tracing.flat import FlatEqn

Member = Step | StateCollective | TokenExchange
_SMALL = 16  # products with a smaller part of the work of the largest beside them are none: they hide nothing


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What a pass computes up to its next exchanges, of which the last one is covered.

    Its positions are those of ``lines``: the equations of each step, then its end; a collective on state is one line.
    """

    members: list[Step | StateCollective] = field(default_factory=list)
    exchanges: list[TokenExchange] = field(default_factory=list)

    @cached_property
    def lines(self) -> list[tuple[Step | StateCollective, FlatEqn | None]]:
        eqns = [(m, m.flat.eqns if isinstance(m, Step) else ()) for m in self.members]
        return [(m, line) for m, found in eqns for line in (*found, None)]

    @cached_property
    def products(self) -> list[tuple[int, int]]:
        found = [(k, product_flops(line.eqn)) for k, (_, line) in enumerate(self.lines) if line is not None]
        most = max((flops for _, flops in found), default=0)
        return [(k, flops) for k, flops in found if flops and flops * _SMALL >= most]


@dataclass(kw_only=True)
class Lane:
    """One of the two passes while it is traced.

    Attributes:
      values: of the step that has begun.
      exchange: the one that has been started and not ended.
      reached: what the other pass waits for: a product, or what is sent.
    """

    context: Context
    segments: Sequence[Segment]
    values: dict[int, Any] | None = None
    exchange: tuple[TokenExchange, Moving] | None = None
    reached: list[Any] = field(default_factory=list)

    def run(self, env: dict[Key, Any], turn: Turn, other: Lane) -> None:
        """One turn: a piece of a segment, and the start of the exchange that follows it."""
        segment = self.segments[turn.segment]
        stop = len(segment.lines) if turn.stop is None else turn.stop
        fenced, last = self._fences(segment, turn.start, stop)
        if self.exchange is not None:
            exchange, moving = self.exchange
            exchange.end(env, moving, other.reached)
            self.exchange = None
        for k in range(turn.start, stop):
            member, eqn = segment.lines[k]
            if not isinstance(member, Step):
                member.run(env)
                continue
            if self.values is None:
                self.values = member.begin(env)
            if eqn is None:
                member.end(env, self.values)
                self.values = None
                continue
            if fenced is not None and k == fenced[0]:
                self._fence(member, fenced[1], other.reached)
            member.evaluate([eqn], self.values)
            if k == last and other.exchange is not None:
                self.reached = [self.values[eqn.outputs[0]]]
                self._fence(member, eqn.outputs[0], other.exchange[1].moved[:1])
        if turn.stop is None and segment.exchanges:
            *before, covered = segment.exchanges
            for found in before:
                found.run(env)
            moving = covered.start(env)
            self.exchange, self.reached = (covered, moving), [*moving.sent]

    def _fence(self, step: Step, value: int, others: Sequence[Any]) -> None:
        assert self.values is not None
        with jax.named_scope(step.word):
            self.values[value] = once_there(self.context, [self.values[value]], others)[0]

    def _fences(self, segment: Segment, start: int, stop: int) -> tuple[tuple[int, int] | None, int | None]:
        """The value that the piece waits with, before a position; and the last product that depends on it.

        After an exchange what was moved waits, and no value need to; else the smallest that the first product reads.
        """
        products = {k for k, _ in segment.products if start <= k < stop}
        waiting = set(self.exchange[0].writes) if self.exchange is not None else set()
        fenced, last, found = None, None, set[int]()
        for k, (member, eqn) in enumerate(segment.lines):
            if not isinstance(member, Step):
                continue
            if eqn is None:
                pairs = zip(member.writes, member.flat.outputs, strict=True)
                waiting.update(key for key, atom in pairs if isinstance(atom, int) and atom in found)
                found = set[int]()
                continue
            found.update(_reading(member, waiting))
            if k in products and fenced is None and self.exchange is None:
                value = _smallest(member, eqn)
                if value is not None:
                    fenced = (k, value)
                    found.add(value)
            if start <= k < stop and not found.isdisjoint(eqn.reads()):
                found.update(eqn.outputs)
                last = k if k in products else last
        return fenced, last


def _reading(step: Step, keys: set[Key]) -> set[int]:
    """The inputs of a step that come from ``keys``."""
    sources = zip(step.flat.inputs, step.inputs, strict=True)
    return {v for v, source in sources if isinstance(source, tuple) and not keys.isdisjoint(source)}


def _smallest(step: Step, eqn: FlatEqn) -> int | None:
    """The smallest array that an equation reads, better none from outside, which would have to be copied."""
    outside, avals = {*step.flat.inputs, *step.flat.consts}, step.flat.avals
    arrays = [
        v for v in eqn.reads() if avals[v].size and not jax.dtypes.issubdtype(avals[v].dtype, jax.dtypes.extended)
    ]
    return min(arrays, key=lambda v: (avals[v].size, v in outside), default=None)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The two passes of a program. ``first`` are gathers, which either may need."""

    context: Context
    first: Sequence[StateCollective]
    longer: Sequence[Segment]
    shorter: Sequence[Segment]

    def run(self, env: dict[Key, Any]) -> dict[Key, Any]:
        """Evaluates all members in turns."""
        for collective in self.first:
            collective.run(env)
        longer, shorter = (Lane(context=self.context, segments=s) for s in (self.longer, self.shorter))
        for turn in turns([s.products for s in self.longer], [s.products for s in self.shorter]):
            lane, other = (longer, shorter) if turn.is_longer else (shorter, longer)
            lane.run(env, turn, other)
        return env


def found_pair(context: Context, members: Sequence[Member]) -> Pair | None:
    """The two passes of different microbatches that members are of; None for one, or more, or without exchanges.

    Where programs have no streams nothing runs beside an exchange.
    """
    begin = next((k for k, m in enumerate(members) if not isinstance(m, StateCollective)), 0)
    first = [m for m in members[:begin] if isinstance(m, StateCollective)]
    passes: dict[tuple[bool, int], list[Member]] = {}
    for m in members[begin:]:
        passes.setdefault((m.id.PASS == "F", m.mb), []).append(m)
    are_two = len(passes) == 2 and len({mb for _, mb in passes}) == 2
    if not (context.has_streams and are_two and any(isinstance(m, TokenExchange) for m in members)):
        return None
    backward, forward = (_segments(passes[key]) for key in sorted(passes))
    longer, shorter = (forward, backward) if len(forward) > len(backward) else (backward, forward)
    return Pair(context=context, first=first, longer=longer, shorter=shorter)


def _segments(members: Sequence[Member]) -> list[Segment]:
    found = [Segment()]
    for m in members:
        if isinstance(m, TokenExchange):
            found[-1].exchanges.append(m)
            continue
        if found[-1].exchanges:
            found.append(Segment())
        found[-1].members.append(m)
    return [*found, Segment()] if found[-1].exchanges else found
