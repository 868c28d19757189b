"""When the programs of two slots are one: the same passes on registers of the same kinds, whatever their group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from piper_jax.lowering.context import Context
from piper_jax.lowering.keys import Key
from piper_jax.lowering.pair import Member
from piper_jax.lowering.slots import Step, local_spec
from piper_jax.tracing.alike import Same


def same_program(
    context: Context, members: Sequence[Member], reads: Sequence[Key], writes: Sequence[Key]
) -> Hashable | None:
    """Equal for slots of one context whose programs are the same functions of their inputs; None for what is in none.

    Args:
      members: of the slot, in order.  reads, writes: the registers that its program reads, and those that it leaves.
    """
    steps = [m for m in members if isinstance(m, Step)]
    if len(steps) < len(members):  # a collective knows its own leaves and groups
        return None
    known: dict[Key, int] = {}

    def numbers(keys: Sequence[Key]) -> Hashable:
        return tuple(known.setdefault(key, len(known)) for key in keys)

    found = tuple(
        (
            Same(step.flat),
            tuple(i if i is None or isinstance(i, str) else numbers(i) for i in step.inputs),
            numbers(step.writes),
            tuple(key in step.added for key in step.writes),
            numbers([Key("microbatch", step.group, None, step.mb)]),
        )
        for step in steps
    )
    kinds = numbers(reads), numbers(writes), tuple(_kind(context, key) for key in known)
    return Same(context), context.slices_on(steps[0].group), found, kinds


def _kind(context: Context, key: Key) -> Hashable:
    spec = local_spec(context, key)
    return key.kind, spec.shape, spec.dtype, context.reduction_of(key)
