"""What the registers of a compiled step would hold, found without compiling: the instructions alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

import piper_jax as piper
from piper_jax.lowering.executable import lower
from piper_jax.lowering.instruction import last_uses
from piper_jax.lowering.keys import Key
from piper_jax.lowering.preparing import lowering_context
from piper_jax.lowering.programs import Compiled, Compiler
from piper_jax.runtime.profiling import kind_of, num_parts
from piper_jax.runtime.ready import accumulator_keys
from piper_jax.runtime.state import state_layout


class Uncompiled(Compiler):
    """Hands out programs that are never compiled and cannot run."""

    def compile(self, body: Callable[..., Sequence[Any]], *, label: str, **_: Any) -> Compiled:
        return Compiled(label=label, digest=label, resolve=lambda: _refused(label))


def _refused(label: str) -> Any:
    raise AssertionError(f"a dry run runs {label}")


def peaks(plan: piper.Plan, rows: int) -> dict[str, int]:
    """The most bytes that one device of each group holds in arrays after an instruction, as a profile counts them."""
    found = lowering_context(plan.complete(), plan.source, jax.devices(), rows, training=True)
    lowering = lower(found, Uncompiled())
    instructions, layout = lowering.instructions(), state_layout(found, lowering.builder.updates)
    kept = (*layout.keys, *accumulator_keys(found))

    def nbytes(key: Key) -> int:
        spec = lowering.builder.global_spec(key)
        return math.prod(spec.shape) * spec.dtype.itemsize // num_parts(found, key)

    batch = [key for i in instructions for key in i.reads if kind_of(key) == "batch"]
    live, largest = dict.fromkeys((*kept, *batch)), dict.fromkeys(found.meshes, 0)
    for instruction, dead in zip(instructions, last_uses(instructions, (*kept, *batch)), strict=True):
        live.update(dict.fromkeys(instruction.writes))
        for key in set(instruction.overwrites).intersection(dead):
            live.pop(key)
        for group, before in largest.items():
            own = (key for key in live if key.group == group and kind_of(key) is not None)
            largest[group] = max(before, sum(map(nbytes, own)))
        for key in dead:
            live.pop(key, None)
    return largest
