"""``order``: what each group runs one after another, and what overlaps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import cast

from piper_jax.errors import DirectiveError
from piper_jax.ir.contraction import contract
from piper_jax.ir.cycles import cycle_lines, cycle_steps, shortest_cycle
from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.filters import Filter, Where, require_filter
from piper_jax.ir.forward import Rewritten
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Compute
from piper_jax.ir.selection import found, keep_index
from piper_jax.primitives.backward_split import Whole, select_in_halves, split_backwards, whole_backwards


def order(dag: Dag, slots: Sequence[Filter | tuple[Filter, ...]]) -> Rewritten:
    """Lets each group run its slots one after another; the members of one slot overlap.

    A slot is a filter or a tuple of filters. What it selects on one group becomes one program, so that the compiler may
    hide the communication of one member under the compute of another. A filter that selects nodes of several groups
    makes a slot on each. The backward passes of frozen operations, which have none, are left out of the slots that list
    them. Nodes that no slot names run as early as their edges allow. ``PASS="BI"`` and ``"BW"`` split
    that backward pass into the part for inputs and the part for weights (zero bubble, arXiv 2401.10241). Where an
    operation is not splittable, its whole B takes the place of BI, and that of BW is left out. ::

        g0: F[PP=0,MB=0], F[PP=0,MB=1], B[PP=0,MB=0], B[PP=0,MB=1] in any order that the edges allow
        -->  order([where(MB=0, PASS="F"), (where(MB=1, PASS="F"), where(MB=0, PASS="B")), where(MB=1, PASS="B")])
        g0: F[PP=0,MB=0] | F[PP=0,MB=1] with B[PP=0,MB=0] | B[PP=0,MB=1]

    A second ``order`` continues after the first.

    Raises:
      DirectiveError: a node without a group, a node in two slots, members of one slot on different groups, BW without
        BI of a backward that cannot be split, or an order that closes a cycle (which is printed).
      FilterError: a filter selects nothing.
    """
    if not isinstance(cast(object, slots), list | tuple):
        raise DirectiveError("order takes a list of slots.", help='order([where(PASS="F"), where(PASS="B")]).')
    listed = [slot if isinstance(slot, tuple) else (slot,) for slot in slots]
    if () in listed:
        raise DirectiveError(f"slot {listed.index(())} is empty.", help="name what runs there, or leave it out.")
    for filter in (filter for slot in listed for filter in slot):
        require_filter(filter)
    listed = _without_absent(dag, listed)
    filters = [filter for slot in listed for filter in slot]
    dag, forward = split_backwards(dag, filters)
    whole = whole_backwards(dag, filters)
    taken = {node: f"slot {i} of an earlier order" for i, slot in enumerate(dag.slots) for node in slot.nodes}
    new: list[Slot] = []
    for number, slot in enumerate(listed):
        for group, members in _by_group(dag, number, slot, whole).items():
            for node in members:
                if node in taken:
                    raise DirectiveError(
                        f"slot {number}: {node} is in {taken[node]} already.",
                        help="list each node once.",
                        conflict="order",
                        node=node,
                    )
                taken[node] = f"slot {number}"
            new.append(Slot(group=group, nodes=members))
    _require_listed(dag, whole.weights, taken)
    ordered = keep_index(dag, replace(dag, slots=(*dag.slots, *new)))
    _require_acyclic(ordered, first_new=len(dag.slots))
    return Rewritten(ordered, forward)


def _without_absent(dag: Dag, slots: Sequence[tuple[Filter, ...]]) -> list[tuple[Filter, ...]]:
    """The slots without the backward passes that frozen operations do not have."""
    frozen = {op.name for op in dag.ops.values() if not op.has_backward}
    if not frozen:
        return list(slots)
    kept = [tuple(f for f in slot if not _means_absent(dag, f, frozen)) for slot in slots]
    return [slot for slot, given in zip(kept, slots, strict=True) if slot or not given]


def _means_absent(dag: Dag, filter: Filter, frozen: Collection[str]) -> bool:
    if not isinstance(filter, Where) or filter.PASS is None or not set(filter.PASS) <= {"B", "BI", "BW"}:
        return False
    forwards = found(dag, replace(filter, PASS=("F",)))
    return bool(forwards) and all(node.op in frozen for node in forwards)


def _require_listed(dag: Dag, whole: Collection[NodeId], listed: Collection[NodeId]) -> None:
    """A backward that stays whole is in the order, where that names its BW."""
    for node in whole:
        if node not in listed:
            op = dag.ops[node.op]
            raise DirectiveError(
                f"{node}: the backward of {op.name} stays whole, so it has no BW.",
                detail=[text for text in (op.whole_because, op.source and f"defined at {op.source}") if text],
                help='list PASS="BI" of it too, in whose place all of it runs, or PASS="B".',
                node=node,
            )


def _by_group(dag: Dag, number: int, slot: tuple[Filter, ...], whole: Whole) -> dict[str, tuple[NodeId, ...]]:
    """The nodes of one slot on each group that it concerns."""
    groups: dict[str, list[NodeId]] = {}
    seen: list[tuple[Filter, set[str]]] = []
    for filter in slot:
        on: set[str] = set()
        chosen = select_in_halves(dag, filter, whole)
        if chosen:
            seen.append((filter, on))
        for node in chosen:
            found = dag.nodes[node]
            if not isinstance(found, Compute):
                raise DirectiveError(
                    f"slot {number}: {filter} selects {node}; updates follow the last backward of their state.",
                    help='leave PASS="U" out.',
                )
            if found.group is None:
                raise DirectiveError(f"slot {number}: {node} has no group yet.", help="call plan.place(...) first.")
            groups.setdefault(found.group, []).append(node)
            on.add(found.group)
    if any(on != seen[0][1] for _, on in seen):
        raise DirectiveError(
            f"slot {number}: its members are on different groups, so they cannot overlap.",
            detail=(f"{filter} is on {', '.join(sorted(on))}" for filter, on in seen),
            help="list them as separate slots, or place them on one group.",
        )
    return {group: tuple(members) for group, members in groups.items()}


def _require_acyclic(dag: Dag, first_new: int) -> None:
    contraction = contract(dag)
    if contraction.is_acyclic:
        return
    steps = cycle_steps(dag, contraction, shortest_cycle(contraction))
    new = {node for slot in dag.slots[first_new:] for node in slot.nodes}
    made = [i for i, step in enumerate(steps) if step.kind in ("order", "with") and step.dst in new]
    added = made[-1] if made else len(steps) - 1
    steps = [*steps[added + 1 :], *steps[: added + 1]]
    src, dst = steps[-1].src, steps[-1].dst
    fused = steps[-1].kind == "with"
    raise DirectiveError(
        f"one slot of {src} and {dst} closes a cycle." if fused else f"{src} before {dst} closes a cycle.",
        detail=cycle_lines(steps, this_directive=len(steps) - 1),
        help="list them as separate slots." if fused else f"list {dst} first.",
        cycle=tuple(step.src for step in steps),
    )
