"""What a plan is lowered and compiled to, once for each mode and each size of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from piper_jax.errors import counted
from piper_jax.lowering.executable import Lowering, lower
from piper_jax.lowering.instruction import Instruction
from piper_jax.lowering.preparing import lowering_context
from piper_jax.lowering.programs import Compiler
from piper_jax.planning import Plan
from piper_jax.runtime.barrier import meet_compiled
from piper_jax.runtime.ready import Ready, accumulator_keys, first_gradients, prepare
from piper_jax.runtime.state import StateLayout, state_layout

Mode = Literal["step", "gradients", "evaluate"]


@dataclass(kw_only=True)
class Executables:
    """Of one plan on its devices.

    Attributes:
      compile_limit: seconds that a process waits until all others have compiled their programs too.
    """

    plan: Plan
    devices: tuple[Any, ...]
    compiler: Compiler
    compile_limit: float
    _layout: StateLayout | None = None
    _lowered: dict[tuple[int, bool], Lowering] = field(default_factory=dict)
    _instructions: dict[tuple[int, bool], list[Instruction]] = field(default_factory=dict)
    _ready: dict[tuple[Mode, int], Ready] = field(default_factory=dict)

    @property
    def device(self) -> Any:
        """The first device of this process, where what it gets as plain arrays is."""
        return next(d for d in self.devices if d.process_index == jax.process_index())

    @property
    def layout(self) -> StateLayout:
        """How the plan keeps a training state; nothing is compiled for it."""
        if self._layout is None:
            self.lowering(self.plan.source.batch.size, training=True)
        assert self._layout is not None
        return self._layout

    def lowering(self, size: int, *, training: bool) -> Lowering:
        """The lowering for batches of ``size`` rows; nothing is compiled."""
        if (size, training) not in self._lowered:
            process = jax.process_index() if jax.process_count() > 1 else None
            found = lowering_context(
                self.plan.complete(), self.plan.source, self.devices, size, training=training, process=process
            )
            self._lowered[size, training] = lower(found, self.compiler)
            if training:
                updates = self._lowered[size, training].builder.updates
                self._layout = self._layout or state_layout(found, updates)
        return self._lowered[size, training]

    def ready(self, mode: Mode, size: int) -> Ready:
        """The executable of a mode for batches of ``size`` rows; all processes meet once they have compiled it."""
        if (mode, size) not in self._ready:
            lowering = self.lowering(size, training=mode != "evaluate")
            instructions = self._lower(lowering, mode, size)
            found = lowering.context
            state_keys = self._layout.keys if self._layout else ()
            wanted = {
                "step": (*state_keys, *accumulator_keys(found)),
                "gradients": tuple(k for k in first_gradients(found) if found.is_here(k.group)),
                "evaluate": (),
            }[mode]
            consumed = state_keys if mode == "step" else ()
            self._ready[mode, size] = prepare(found, instructions, wanted, self.device, consumed)
            if found.process is not None:
                meet_compiled(instructions, f"{mode} of {counted(size, 'row')} compiled", self.compile_limit)
        return self._ready[mode, size]

    def _lower(self, lowering: Lowering, mode: Mode, size: int) -> list[Instruction]:
        known = size, mode != "evaluate"
        if known not in self._instructions:
            self._instructions[known] = lowering.instructions()
        if mode != "gradients":
            return self._instructions[known]
        kept = [i for i in self._instructions[known] if i.role not in ("update", "exchange")]
        return [*kept, *lowering.reductions()]
