"""Finding the nodes that a filter selects, in time proportional to what it selects."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import assert_never

from piper_jax.errors import FilterError
from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import ADMITTED, And, Filter, Not, Or, Where, leaves, require_filter, selects, under
from piper_jax.ir.ids import NodeId


class NodeIndex:
    """The compute and update nodes of one set of ids, by their coordinates. Filters with exact ones are look-ups."""

    __slots__ = ("by", "exact", "ids", "is_split", "position")

    def __init__(self, ids: Sequence[NodeId]):
        self.ids = tuple(ids)
        self.position = {node: i for i, node in enumerate(self.ids)}
        self.exact: dict[tuple[str | None, int | None, int | None], list[NodeId]] = {}
        self.by: dict[str, dict[int | str | None, list[NodeId]]] = {"PASS": {}, "PP": {}, "MB": {}}
        by_pass, by_stage, by_microbatch = self.by["PASS"], self.by["PP"], self.by["MB"]
        for node in self.ids:
            _, pass_, stage, _, microbatch = node
            self.exact.setdefault((pass_, stage, microbatch), []).append(node)
            by_pass.setdefault(pass_, []).append(node)
            by_stage.setdefault(stage, []).append(node)
            by_microbatch.setdefault(microbatch, []).append(node)
        self.is_split = any(microbatch is not None for microbatch in by_microbatch)

    def looked_up(self, leaf: Where) -> list[NodeId] | None:
        """The nodes of one stage, microbatch and named pass; None where ``leaf`` does not name just one of each."""
        stage, microbatch, passes = leaf.PP, leaf.MB, leaf.PASS
        if isinstance(stage, int) and isinstance(microbatch, int) and passes is not None and len(passes) == 1:
            return [n for p in ADMITTED[passes[0]] for n in self.exact.get((p, stage, microbatch), ())]
        return None

    def candidates(self, leaf: Where) -> Sequence[NodeId]:
        """Few nodes among which are all those that ``leaf`` selects, in node order."""
        known = self.looked_up(leaf)
        if known is not None:
            return known
        shortest: Sequence[NodeId] = self.ids
        for name, value in (("PP", leaf.PP), ("MB", leaf.MB)):
            if isinstance(value, int):
                found = self.by[name].get(value, [])
                shortest = found if len(found) < len(shortest) else shortest
            elif isinstance(value, tuple):
                parts = [self.by[name].get(number, []) for number in dict.fromkeys(value)]
                if sum(map(len, parts)) < len(shortest):
                    shortest = sorted(chain.from_iterable(parts), key=self.position.__getitem__)
        return shortest


def index_of(dag: Dag) -> NodeIndex:
    """The index of a DAG's nodes, built once."""
    index = dag.memo.get("index")
    if index is None:
        index = dag.memo["index"] = NodeIndex(tuple(dag.nodes))
    return index


def keep_index(old: Dag, new: Dag) -> Dag:
    """``new``, which has the same node ids and paths as ``old``, with the index of ``old``."""
    if "index" in old.memo:
        new.memo["index"] = old.memo["index"]
    return new


def is_split(dag: Dag) -> bool:
    """Whether nodes have microbatch coordinates."""
    return index_of(dag).is_split


def paths_of(dag: Dag, node: NodeId) -> tuple[str, ...]:
    """The module paths by which filters find a node: of its operation, or of the state that it updates."""
    op = dag.ops.get(node.op)
    if op is not None:
        return (op.name, *op.path.split())
    bucket = dag.buckets.get(node.op.removeprefix("update "))
    return () if bucket is None else (bucket.name, *(leaf.path for leaf in bucket.leaves))


def select(dag: Dag, filter: Filter) -> tuple[NodeId, ...]:
    """The nodes that ``filter`` selects, in node order; never none.

    Raises:
      FilterError: nothing matches (the message names the nearest coordinates that exist), or MB is named before split.
    """
    require_filter(filter)
    index = index_of(dag)
    for leaf in leaves(filter):
        if leaf.MB is not None and not index.is_split:
            raise FilterError(
                f"{filter}: there are no microbatches before split.",
                help="call plan.split(where(), num_microbatches=...) first, or leave MB out.",
            )
    nodes = _found(dag, index, filter)
    if not nodes:
        raise _nothing(dag, index, filter)
    for leaf in leaves(filter):
        _require_known(index, filter, leaf)
    return tuple(nodes)


def _require_known(index: NodeIndex, filter: Filter, leaf: Where) -> None:
    """Refuses numbers among several that no node has, as one such number alone is refused."""
    for name, spec in (("PP", leaf.PP), ("MB", leaf.MB)):
        if not spec or not isinstance(spec, tuple | range):
            continue
        numbers = (spec[0], spec[-1]) if isinstance(spec, range) else spec
        missing = [number for number in numbers if number not in index.by[name]]
        if missing:
            existing = sorted(number for number in index.by[name] if isinstance(number, int))
            raise FilterError(
                f"{filter}: there is no {name}={missing[0]}.",
                detail=(f"{name} is {numbers_text(existing)}",),
                help="name coordinates that exist.",
            )


def found(dag: Dag, filter: Filter) -> tuple[NodeId, ...]:
    """The nodes that ``filter`` selects, in node order; possibly none."""
    return tuple(_found(dag, index_of(dag), filter))


def _found(dag: Dag, index: NodeIndex, filter: Filter) -> Sequence[NodeId]:
    match filter:
        case Where():
            known = index.looked_up(filter) if filter.EP is None else None
            found = [n for n in index.candidates(filter) if filter.admits_id(n)] if known is None else known
            return found if filter.path is None else [n for n in found if under(filter.path, paths_of(dag, n))]
        case Or(left=left, right=right):
            union = {*_found(dag, index, left), *_found(dag, index, right)}
            return sorted(union, key=index.position.__getitem__)
        case And(left=left, right=right):
            return [n for n in _found(dag, index, left) if selects(right, n, lambda n: paths_of(dag, n))]
        case Not():
            return [n for n in index.ids if selects(filter, n, lambda n: paths_of(dag, n))]
        case _ as never:
            assert_never(never)


def _nothing(dag: Dag, index: NodeIndex, filter: Filter) -> FilterError:
    """The error for an empty match: what exists of each coordinate that the filter names."""
    lines: list[str] = []
    for leaf in leaves(filter):
        for name, spec in leaf.coordinates():
            others = _found(dag, index, replace(leaf, **{name: None})) or index.ids
            existing = sorted({c for c in (getattr(n, name) for n in others) if c is not None})
            lines.append(f"{name} is {numbers_text(existing)}{_nearest(spec, existing)}")
        if leaf.PASS is not None:
            others = _found(dag, index, replace(leaf, PASS=None)) or [n for n in index.ids if n.PASS != "U"]
            present = {str(n.PASS) for n in others}
            lines.append("PASS is " + ", ".join(p for p in ADMITTED if p in present))
            if {"BI", "BW"} & {*leaf.PASS} - present and "B" in present:
                lines.append("B has no halves before an order names BI and BW")
        if leaf.path is not None:
            updates = leaf.PASS is not None and "U" in leaf.PASS
            known = sorted({p for node in index.ids if (node.PASS == "U") == updates for p in paths_of(dag, node)})
            near = [m for p in leaf.path for m in difflib.get_close_matches(p, known, n=3, cutoff=0.3)]
            lines.append("paths near it: " + ", ".join(near or known[:3]))
    return FilterError(
        f"{filter} matches nothing.", detail=dict.fromkeys(lines), help="name coordinates that exist.", filter=filter
    )


def _nearest(spec: object, existing: Sequence[int]) -> str:
    if not isinstance(spec, int) or not existing or spec in existing:
        return ""
    return f"; nearest to {spec} is {min(existing, key=lambda c: abs(c - spec))}"


def numbers_text(numbers: Sequence[int]) -> str:
    """``0-3, 5`` for ascending numbers 0, 1, 2, 3, 5; ``none`` for none."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"
