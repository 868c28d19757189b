"""``cut``: neighbouring units of the model become pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from piper_jax.errors import DirectiveError, counted
from piper_jax.ir.dag import Dag
from piper_jax.ir.forward import ForwardMap, Rewritten
from piper_jax.ir.nodes import Compute, Op
from piper_jax.ir.selection import is_split, numbers_text
from piper_jax.primitives.balance import stages_at_borders
from piper_jax.primitives.merge import merge_ops
from piper_jax.primitives.named_stages import units_of_stages


def cut(dag: Dag, *, stages: int | Sequence[Sequence[int]] | Sequence[str]) -> Rewritten:
    """Groups neighbouring units into stages, renumbered PP = 0, 1, 2, ...

    Given a number, the largest stage's forward and backward operations are as few as possible; among those cuts the
    fewest bytes cross stages, then stages are as equal as possible. Embedding and head count like any other unit.
    A stage ends inside a layer, where more bytes cross, only if the largest would be over 5 % larger otherwise.
    Alpa calls this stage construction. Expert regions stay operations of their own. ::

        F[PP=0] layers.0 --> F[PP=1] layers.1 --> F[PP=2] layers.2 --> F[PP=3] layers.3
        -->  cut(stages=2)
        F[PP=0] layers.0-1 --> F[PP=1] layers.2-3

    Args:
      dag: a DAG that is not split, placed or ordered yet.
      stages: how many; or the units of each stage, ``[(0, 1), (2,)]``; or paths, ``["embed, layers.0", "layers.1-3"]``.

    Raises:
      DirectiveError: fewer units than stages, stages that are not neighbouring units in order, or cut out of phase.
    """
    _require_phase(dag)
    units = sorted({node.PP for node in dag.nodes if node.PP is not None})
    wanted = _stages(dag, units, stages)
    stage_of = {unit: stage for stage, members in enumerate(wanted) for unit in members}
    if len(wanted) == len(units):
        clusters = {op.name: op.name for op in dag.ops.values()}
    else:
        clusters = _clusters(dag, stage_of)
    merged, forward = merge_ops(dag, clusters, stage_of)
    return Rewritten(merged, forward if merged != dag else ForwardMap())


def _require_phase(dag: Dag) -> None:
    later = "split" if is_split(dag) else "order" if dag.slots else None
    if later is None and any(isinstance(node, Compute) and node.group is not None for node in dag.nodes.values()):
        later = "place"
    if later is not None:
        raise DirectiveError(f"cut comes before {later}.", help=f"call plan.cut(...) before plan.{later}(...).")


def _stages(
    dag: Dag, units: Sequence[int], stages: int | Sequence[Sequence[int]] | Sequence[str]
) -> Sequence[Sequence[int]]:
    """The units of each stage, checked."""
    if isinstance(stages, int):
        if not 1 <= stages <= len(units):
            raise DirectiveError(
                f"the model has {counted(len(units), 'unit')}, too few for {counted(stages, 'stage')}."
                if stages > 0
                else f"{counted(stages, 'stage')} are too few.",
                help=f"use {'1 to ' * (len(units) > 1)}{counted(len(units), 'stage')}, or annotate more regions.",
                units=len(units),
                stages=stages,
            )
        costs, crossing = _costs(dag, units)
        return [[units[i] for i in part] for part in stages_at_borders(costs, crossing, stages)]
    texts = [stage for stage in stages if isinstance(stage, str)]
    given = units_of_stages(dag, texts) if texts else cast(Sequence[Sequence[int]], stages)
    if not given:
        raise DirectiveError("stages is empty.", help="list the units of each stage, or leave stages out.")
    listed = [unit for members in given for unit in members]
    if listed != list(units) or not all(given):
        raise DirectiveError(
            f"stages {[tuple(members) for members in given]} are not the units {numbers_text(units)} in order.",
            help="list every unit once, ascending, at least one in each stage.",
        )
    return given


def _costs(dag: Dag, units: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each unit its operations, and for each boundary after a unit the bytes that cross it."""
    position = {unit: i for i, unit in enumerate(units)}
    costs, crossing = [0] * len(units), [0] * len(units)
    for op in dag.ops.values():
        if op.PP is not None:
            costs[position[op.PP]] += op.flops
    furthest: dict[tuple[str, int], int] = {}
    for edge in dag.data:
        if edge.src.PP is None or edge.dst.PP is None:
            continue
        low, high = sorted((position[edge.src.PP], position[edge.dst.PP]))
        for value in edge.values:
            known = furthest.get((value, low))
            furthest[value, low] = high if known is None else max(known, high)
    for (value, low), high in furthest.items():
        known = dag.values.get(value)
        for boundary in range(low, high):
            crossing[boundary] += known.nbytes if known is not None else 0
    return costs, crossing


def _clusters(dag: Dag, stage_of: Mapping[int, int]) -> dict[str, str]:
    """For each operation the first one that it merges with.

    Two operations outside of expert regions merge if they are in one stage and equally many expert regions lie before
    them on the longest path inside the stage; then no path between them leaves the merged operation.
    """
    depth: dict[str, int] = {}
    before: dict[str, list[str]] = {}
    for edge in dag.data:
        src, dst = dag.ops.get(edge.src.op), dag.ops.get(edge.dst.op)
        if src and dst and edge.src.PASS == edge.dst.PASS == "F" and stage_of[_pp(src)] == stage_of[_pp(dst)]:
            before.setdefault(dst.name, []).append(src.name)
    first: dict[tuple[int, int], str] = {}
    clusters: dict[str, str] = {}
    for node in dag.nodes:
        op = dag.ops.get(node.op)
        if op is None or op.name in clusters:
            continue
        depth[op.name] = max((depth[p] + (dag.ops[p].EP is not None) for p in before.get(op.name, ())), default=0)
        alone = op.EP is not None
        key = (stage_of[_pp(op)], depth[op.name])
        clusters[op.name] = op.name if alone else first.setdefault(key, op.name)
    return clusters


def _pp(op: Op) -> int:
    return cast(int, op.PP)
