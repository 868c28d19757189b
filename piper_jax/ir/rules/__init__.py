"""The checker: a list of named rules that every plan keeps before it is lowered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from piper_jax.errors import PlanError
from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.rules import carried, communication, experts, limits, state, structure
from piper_jax.ir.rules.base import Checked, Rule

RULES: tuple[Rule, ...] = (
    Rule(
        name="known-names",
        text="Every edge, slot and node refers to nodes, groups and operations that the plan has.",
        why="A name that stands for nothing would be skipped silently.",
        find=structure.unknown_references,
        always=True,
    ),
    Rule(
        name="possible-shapes",
        text="The axes of a group multiply to its devices, and the batch is a dimension of the array that it divides.",
        why="Replicas or rows would be counted that are not there.",
        find=structure.impossible_shapes,
        always=True,
    ),
    Rule(
        name="placed-once",
        text="Every operation runs exactly once per microbatch: F, and B or both BI and BW where it has a backward.",
        why="A missing or repeated layer trains another model without any error.",
        find=structure.misplaced_operations,
        always=True,
    ),
    Rule(
        name="backward-with-forward",
        text="The backward passes of an operation run on the group of its forward, for each microbatch.",
        why="The residuals lie there; sending them would cost more than the whole schedule saves.",
        find=structure.separated_passes,
        directive="place",
    ),
    Rule(
        name="disjoint-groups",
        text="Every device is in one group, once.",
        why="Two groups would run their programs on one device, in an order that nobody chose.",
        find=structure.overlapping_groups,
        always=True,
    ),
    Rule(
        name="sound-slots",
        text="Every node is in at most one slot, and all nodes of a slot are on its group.",
        why="A slot is one program of one group.",
        find=structure.unsound_slots,
        always=True,
    ),
    Rule(
        name="matched-transfers",
        text="Every send has its receive and every receive its send, with the same values and groups.",
        why="A receive without a send waits for ever.",
        find=communication.unmatched_transfers,
    ),
    Rule(
        name="values-arrive",
        text="Every value is read on the group that produced, received, gathered or reduced it.",
        why="A group cannot see the memory of another one.",
        find=communication.unmoved_values,
    ),
    Rule(
        name="values-complete",
        text="Every microbatch of an operation reads the same values, a backward has the residuals of its forward, and "
        "what is sent or reduced has its values.",
        why="A reader that no edge holds back may run before what it reads is there.",
        find=communication.lost_values,
    ),
    Rule(
        name="same-order",
        text="Any two groups name the transfers and collectives that they share in the same order.",
        why="Each would wait for the other.",
        find=communication.disagreeing_orders,
    ),
    Rule(
        name="deadlock-free",
        text="With each slot, each matched transfer and each collective as one vertex, the orders of all groups and "
        "the data edges form no cycle.",
        why="Orders that agree on every pair of groups may still lock up three of them, and a slot starts as a whole.",
        find=communication.deadlocks,
    ),
    Rule(
        name="members-in-order",
        text="A slot lists its members after what they read.",
        why="A program would use parameters before it gathers them, or reduce a gradient before it is there.",
        find=structure.misordered_members,
    ),
    Rule(
        name="whole-orders",
        text="An order that names a pass of an operation on a group names it for every microbatch there.",
        why="A schedule that forgets a microbatch would run it at a time that nobody chose.",
        find=structure.forgotten_microbatches,
        directive="order",
    ),
    Rule(
        name="known-axes",
        text="A group has every mesh axis over which its state is replicated or its operations are sharded.",
        why="An axis that is not there would be skipped silently.",
        find=state.missing_axes,
    ),
    Rule(
        name="experts-divide",
        text="Parameters of experts that are divided over devices have the experts on dimension 0, an equal number for "
        "each device, and nothing else reads them.",
        why="A device would hold a part of an expert, or miss one that it needs.",
        find=experts.undivided_experts,
    ),
    Rule(
        name="tensor-divides",
        text="A dimension that the tensor axis divides has an equal part for each of its devices, and is not that of "
        "divided experts.",
        why="XLA would pad it, or refuse it after minutes of compiling.",
        find=state.undivided_tensors,
    ),
    Rule(
        name="replicas-agree",
        text="State is replicated or sharded over every data and expert axis of its owners that is larger than one.",
        why="Copies with different gradients drift apart.",
        find=state.diverging_replicas,
    ),
    Rule(
        name="updated-on-every-owner",
        text="Every owner of trainable state updates it once per step, after all its gradients are reduced.",
        why="Tied parameters would drift apart, or a gradient would be lost.",
        find=state.incomplete_updates,
    ),
    Rule(
        name="carried-in-order",
        text="State that each microbatch takes over from the one before it is changed by one operation, on one group, "
        "microbatch by microbatch; what no batch changes, such as a counter, by each operation that reads it.",
        why="It would be another state than that of one device, and nobody would see it.",
        find=carried.disordered_carries,
    ),
    Rule(
        name="carried-once",
        text="Whatever a forward pass leaves for the next step is reduced over all copies of that state.",
        why="Replicas would carry on different states.",
        find=carried.lost_carries,
    ),
    Rule(
        name="nothing-read-after-free",
        text="Parameters that are sharded between their uses are gathered before each use and kept until the last.",
        why="What is read after it is freed is garbage.",
        find=state.freed_parameters,
    ),
    Rule(
        name="shards-gathered",
        text="Under ZeRO, parameters that are whole between steps are gathered after the last update on every owner, "
        "and what is not updated element by element is gathered before it.",
        why="Each replica would keep its own part of the update, or update a part as if it were the whole.",
        find=state.ungathered_shards,
    ),
    Rule(
        name="batch-divides",
        text="The rows of a batch divide by microbatches times replicas.",
        why="Slices of different sizes would weigh samples differently.",
        find=limits.undivided_batches,
        directive="split",
    ),
    Rule(
        name="fits-in-memory",
        text="No device holds more at its peak than the limit, where one is given.",
        why="The step would fail after minutes of compiling.",
        find=limits.exceeded_memory,
    ),
)
DEADLOCK_FREE, FITS_IN_MEMORY = (
    next(rule for rule in RULES if rule.name == name) for name in ("deadlock-free", "fits-in-memory")
)


def check(
    dag: Dag,
    *,
    slots: tuple[Slot, ...] | None = None,
    memory_limit: int | None = None,
    peak_bytes: Mapping[str, int] | None = None,
    rules: Iterable[Rule] = RULES,
) -> None:
    """Holds a completed DAG against every rule, in order.

    Args:
      dag: completed.
      slots: what order directives named; None means all slots of ``dag``.
      memory_limit: bytes on each device, or None for any.
      peak_bytes: the most that one device of each group holds; needed with a limit.
      rules: those to hold it against.

    Raises:
      PlanError: the first fault of the first broken rule; ``error.data["rule"]`` names the rule, and where that has a
        directive, ``error.data["directive"]`` names that.
    """
    named = dag.slots if slots is None else slots
    _hold(rules, Checked(dag=dag, slots=named, memory_limit=memory_limit, peak_bytes=peak_bytes or {}))


def check_as_it_is(dag: Dag) -> None:
    """Holds a DAG that need not be completed against the rules that always hold.

    Raises:
      PlanError: as :func:`check`.
    """
    _hold([rule for rule in RULES if rule.always], Checked(dag=dag, slots=dag.slots, is_complete=False))


def _hold(rules: Iterable[Rule], checked: Checked) -> None:
    for rule in rules:
        for fault in rule.find(checked):
            known = {"rule": rule.name, "directive": rule.directive, **fault.data}
            raise PlanError(f"{rule.name}: {fault.what}", detail=fault.detail, help=fault.help, **known)


def rules_text() -> str:
    """The list of rules as Markdown, as in ``docs/checks.md``."""
    sections = (f"## {rule.name}\n\n{rule.text}\n\nOtherwise: {_lower(rule.why)}\n" for rule in RULES)
    return "\n".join(sections)


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


__all__ = ["DEADLOCK_FREE", "FITS_IN_MEMORY", "RULES", "Checked", "Rule", "check", "check_as_it_is", "rules_text"]
