"""Assigns every equation that works on activations to one unit: an annotated region, or an automatic cut point.

Equations that depend on no parameter, or on parameters alone, roam: they are recomputed in each unit that uses them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from piper_jax import _jax_compat
from piper_jax.errors import AnnotationError, TraceError
from piper_jax.tracing.costs import eqn_flops
from piper_jax.tracing.flat import REPLICA_MEAN, FlatEqn, RegionKey, holds, inner_jaxprs
from piper_jax.tracing.loss_program import LossProgram
from piper_jax.tracing.model_state import nbytes
from piper_jax.tracing.opening import hidden_region

_CUT_WINDOW = 1 / 16  # of the FLOPs, on each side: a border must be the narrowest of its neighbourhood
_TINY = 1e-3  # of the FLOPs: less than this at either end is no unit of its own
_LARGE = 1 / 64  # of the FLOPs: more than this in one unit is divided, at its narrowest border, into no less than half
_CAPACITY = 2**30


def assign_units(program: LossProgram) -> tuple[int | None, ...]:
    """The unit of every equation, ascending in trace order; None for equations that roam.

    Raises:
      AnnotationError: a PP region inside another one.
      TraceError: a region inside a loop or a branch; a mean over replicas inside a branch.
    """
    fixed = [i for i, eqn in enumerate(program.flat.eqns) if is_activation(program, eqn)]
    keys: dict[RegionKey, int] = {}
    annotated: dict[int, int] = {}
    for i in fixed:
        if (key := _pipeline_region(program.flat.eqns[i])) is not None:
            annotated[i] = keys.setdefault(key, len(keys))
    for eqn in program.flat.eqns:
        _refuse_hidden_regions(eqn)
        _refuse_means_on_one_way(eqn)
    graph = _Graph(program, fixed)
    units = graph.joined(annotated, len(keys)) if keys else graph.narrow_units()
    return tuple(units.get(i) for i in range(len(program.flat.eqns)))


def uncounted_regions(program: LossProgram) -> tuple[str, ...]:
    """For each annotated region that is no unit, since all in it roams, a line that names it and says why."""
    found: dict[RegionKey, list[FlatEqn]] = {}
    for eqn in program.flat.eqns:
        if (key := _pipeline_region(eqn)) is not None:
            found.setdefault(key, []).append(eqn)
    roaming = [eqns for eqns in found.values() if not any(is_activation(program, eqn) for eqn in eqns)]
    return tuple(_uncounted(program, eqns) for eqns in roaming)


def _uncounted(program: LossProgram, eqns: Sequence[FlatEqn]) -> str:
    reads = {a for eqn in eqns for a in eqn.reads()}
    missing = "batch" if any(program.param_dependent[a] for a in reads) else "parameters"
    line = next(filter(None, (_jax_compat.user_line(eqn.eqn) for eqn in eqns)), eqns[0].path)
    return f'annotate("PP") around {line} is no unit: nothing in it depends on the {missing}; its readers compute it.'


def is_activation(program: LossProgram, eqn: FlatEqn) -> bool:
    """Whether the equation depends on both parameters and data (or has an effect), and so is placed exactly once."""
    reads = list(eqn.reads())
    on_params = any(program.param_dependent[a] for a in reads)
    return eqn.has_effects or (on_params and any(program.data_dependent[a] for a in reads))


def _pipeline_region(eqn: FlatEqn) -> RegionKey | None:
    keys = [key for key in eqn.regions if key.tag == "PP"]
    if len(keys) > 1:
        raise AnnotationError(
            f'annotate("PP") inside another PP region, at {eqn.path or eqn.name}.',
            help="annotate either the layer class or the block around its call, not both.",
        )
    return keys[0] if keys else None


def _refuse_hidden_regions(eqn: FlatEqn) -> None:
    if (tag := hidden_region(eqn.eqn)) is not None:
        what = 'annotate("PP")' if tag == "PP" else "an expert region"
        line = _jax_compat.user_line(eqn.eqn)
        raise TraceError(
            f"{what} inside `{eqn.name}` at {eqn.path or 'the loss function'}{f' ({line})' if line else ''}.",
            help=f"a {eqn.name} is computed in one place; put the region around all of it, or write what it holds as "
            "Python code.",
        )


def _refuse_means_on_one_way(eqn: FlatEqn) -> None:
    """Replicas that go different ways would not meet in a mean of all of them."""
    if (name := _branching(eqn.eqn, REPLICA_MEAN)) is not None:
        line = _jax_compat.user_line(eqn.eqn)
        raise TraceError(
            f"{REPLICA_MEAN} inside `{name}` at {eqn.path or 'the loss function'}{f' ({line})' if line else ''}.",
            help="each replica may go another way there; take the mean outside, and choose with jnp.where.",
        )


def _branching(eqn: Any, wanted: str) -> str | None:
    """The name of a branch or an open loop that holds a primitive at any depth, if the equation is or holds one."""
    inner = [e for jaxpr in inner_jaxprs(eqn.params) for e in jaxpr.eqns]
    if eqn.primitive.name in ("cond", "while") and any(holds(e, wanted) for e in inner):
        return eqn.primitive.name
    return next(filter(None, (_branching(e, wanted) for e in inner)), None)


class _Graph:
    """Activation equations and the bytes of the values between them."""

    def __init__(self, program: LossProgram, fixed: Sequence[int]):
        self.flat, self.fixed = program.flat, list(fixed)
        producer = {o: i for i in fixed for o in self.flat.eqns[i].outputs}
        self.inputs = {i: self._producers(i, producer) for i in fixed}
        self.consumers: dict[int, list[int]] = {i: [] for i in fixed}
        self.value_consumers: dict[int, list[int]] = {}
        for i in fixed:
            for value in self.inputs[i]:
                self.value_consumers.setdefault(value, []).append(i)
                self.consumers[producer[value]].append(i)
        self.producer = producer

    def _producers(self, index: int, producer: dict[int, int]) -> list[int]:
        return sorted({a for a in self.flat.eqns[index].reads() if a in producer})

    def joined(self, annotated: dict[int, int], num_units: int) -> dict[int, int]:
        """Unannotated equations join a unit by minimum cut at every border, ties to the earlier unit."""
        low: dict[int, int] = {}
        for i in self.fixed:
            before = [low[self.producer[v]] for v in self.inputs[i]]
            low[i] = annotated.get(i, max(before, default=0))
            if i in annotated and before and max(before) > annotated[i]:
                raise TraceError(
                    f"a value of PP={max(before)} flows back into PP={annotated[i]} at {self.flat.eqns[i].path}.",
                    help="regions must be entered in the order in which data flows through them.",
                )
        high: dict[int, int] = {}
        for i in reversed(self.fixed):
            after = [high[c] for c in self.consumers[i]]
            high[i] = annotated.get(i, min(after, default=num_units - 1))
        for border in range(num_units - 1):
            open_ = [i for i in self.fixed if low[i] <= border < high[i]]
            left = self._source_side(open_, low, border) if open_ else set()
            for i in open_:
                if i in left:
                    high[i] = border
                else:
                    low[i] = border + 1
        return {i: low[i] for i in self.fixed}

    def _source_side(self, open_: list[int], low: dict[int, int], border: int) -> set[int]:
        """The larger of the minimum cuts' source sides, among the equations that may be on either side."""
        nodes = {i: k for k, i in enumerate(open_)}
        values = sorted(
            {v for i in open_ for v in (*self.inputs[i], *self.flat.eqns[i].outputs) if v in self.value_consumers}
        )
        source, sink = len(nodes) + len(values), len(nodes) + len(values) + 1
        edges: dict[tuple[int, int], int] = {}

        def side(i: int) -> int:
            return nodes[i] if i in nodes else source if low[i] <= border else sink

        scale = max(sum(nbytes(self.flat.avals[v]) for v in values), 1) / _CAPACITY
        for k, value in enumerate(values, start=len(nodes)):
            start = side(self.producer[value])
            edges[start, k] = max(int(nbytes(self.flat.avals[value]) / scale), 1)
            for consumer in self.value_consumers[value]:
                edges[k, side(consumer)] = _CAPACITY
                if side(consumer) != start:
                    edges[side(consumer), start] = _CAPACITY
        edges = {(a, b): c for (a, b), c in edges.items() if a != b and b != source and a != sink}
        rows, cols = [a for a, _ in edges], [b for _, b in edges]
        graph = csr_matrix((np.array(list(edges.values()), np.int32), (rows, cols)), shape=(sink + 1, sink + 1))
        residual = (graph - maximum_flow(graph, source, sink).flow).tocsc()
        reaches_sink, pending = {sink}, [sink]
        while pending:
            node = pending.pop()
            for k in range(residual.indptr[node], residual.indptr[node + 1]):
                if residual.data[k] > 0 and residual.indices[k] not in reaches_sink:
                    reaches_sink.add(int(residual.indices[k]))
                    pending.append(int(residual.indices[k]))
        return {i for i, k in nodes.items() if k not in reaches_sink}

    def narrow_units(self) -> dict[int, int]:
        """Without regions: units end where fewer bytes cross than anywhere near, measured in FLOPs; what is then still
        large is divided at its narrowest border."""
        if not self.fixed:
            return {}
        flops = np.cumsum([eqn_flops(self.flat.eqns[i].eqn) for i in self.fixed], dtype=np.float64)
        crossing, total = self._crossing_bytes(), flops[-1]
        borders = [
            p for p in range(len(flops) - 1)
            if flops[p + 1] > flops[p] and _TINY * total < flops[p] < (1 - _TINY) * total and not self._in_one_region(p)
        ]  # fmt: skip
        ends = [p for p in borders if crossing[p] <= self._narrowest_near(p, flops, crossing)]
        for first, last in pairwise((-1, *ends, len(flops) - 1)):
            ends += _divided(first, last, borders, flops, crossing)
        unit = np.searchsorted(np.sort(ends), np.arange(len(flops)))
        return {i: int(unit[position]) for position, i in enumerate(self.fixed)}

    def _narrowest_near(self, position: int, flops: np.ndarray, crossing: np.ndarray) -> float:
        window, total = _CUT_WINDOW * flops[-1], flops[-1]
        first = int(np.searchsorted(flops, flops[position] - window))
        last = int(np.searchsorted(flops, min(flops[position] + window, total * (1 - 1e-9))))
        near = crossing[first : max(last, position) + 1]
        return near[near > 0].min(initial=np.inf)

    def _in_one_region(self, position: int) -> bool:
        """Whether an activation equation and the next one lie in the same expert region."""
        here, after = (self.flat.eqns[self.fixed[k]].regions for k in (position, position + 1))
        return any(key.tag == "EP" and key in after for key in here)

    def _crossing_bytes(self) -> np.ndarray:
        """Bytes of the values alive between each activation equation and the next."""
        position = {i: k for k, i in enumerate(self.fixed)}
        change = np.zeros(len(self.fixed) + 1)
        for value, consumers in self.value_consumers.items():
            size = nbytes(self.flat.avals[value])
            change[position[self.producer[value]]] += size
            change[max(position[c] for c in consumers)] -= size
        return np.cumsum(change)[:-1]


def _divided(first: int, last: int, borders: Sequence[int], flops: np.ndarray, crossing: np.ndarray) -> list[int]:
    """Further ends of units among the equations after ``first`` up to ``last``, if they are many."""
    large, start, end = _LARGE * flops[-1], flops[first] if first >= 0 else 0.0, flops[last]
    inner = borders[bisect_right(borders, first) : bisect_left(borders, last)]
    inner = [p for p in inner if flops[p] - start >= large / 2 and end - flops[p] >= large / 2]
    if end - start <= large or not inner:
        return []
    narrowest = min(inner, key=lambda p: (crossing[p], abs(2 * flops[p] - start - end)))
    halves = ((first, narrowest), (narrowest, last))
    return [narrowest, *(p for half in halves for p in _divided(*half, borders, flops, crossing))]
