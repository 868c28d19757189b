"""What a rule of the checker is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from piper_jax.errors import PlanError
from piper_jax.ir.dag import Dag, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the rules look at: a completed DAG, and limits that the caller sets.

    Attributes:
      dag: completed; or as directives left it, for the rules that hold even then.
      slots: what order directives named; completion names more where parameters are gathered.
      memory_limit: bytes on each device, or None.
      peak_bytes: the most that one device of each group holds at once; read only with a limit.
    """

    dag: Dag
    slots: tuple[Slot, ...] = ()
    memory_limit: int | None = None
    peak_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    is_complete: bool = True


Find = Callable[[Checked], Iterable[PlanError]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that every plan must keep.

    Attributes:
      name: as in messages.
      text: what must hold, in one sentence; the documentation shows it.
      why: what would go wrong otherwise.
      find: yields an error for each fault, without the rule's name.
      directive: the primitive that brings a fault about, so that a plan's errors name the user's call of it: the one
        that selected ``node`` of the fault's data.
      always: holds before a plan is complete too, so that a plan is held against it when it is loaded.
    """

    name: str
    text: str
    why: str
    find: Find
    directive: str = ""
    always: bool = False

    @property
    def anchor(self) -> str:
        """Where the documentation describes it."""
        return f"docs/checks.md#{self.name}"
