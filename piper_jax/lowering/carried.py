"""Carried state of a step: what its first slices see, and what the next step gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.ir.carried import carry_of
from piper_jax.ir.ids import NodeId
from piper_jax.ir.ownership import Ownership
from piper_jax.lowering.builder import Builder
from piper_jax.lowering.collectives import StateCollective
from piper_jax.lowering.context import Context
from piper_jax.lowering.group_mesh import SLICE
from piper_jax.lowering.instruction import Instruction
from piper_jax.lowering.keys import Key
from piper_jax.lowering.local_program import LocalProgram
from piper_jax.lowering.slots import local_spec


def carried_state(
    builder: Builder, collectives: Mapping[NodeId, StateCollective]
) -> tuple[list[Instruction], list[Instruction]]:
    """One program of each group before the step's first, and one after its last; none where nothing is carried."""
    context = builder.context
    if not context.carried or not context.training:
        return [], []
    begin, end = [], []
    for group in context.here:
        owned = {bucket: o for bucket, o in context.carried.items() if group in o.owners}
        if owned:
            reductions = [c for c in collectives.values() if c.group == group and c.owned.bucket in owned]
            begin.append(builder.local("prologue", group, _begin(context, group, owned)))
            nodes = tuple(c.id for c in reductions)
            end.append(builder.local("update", group, _end(context, group, owned, reductions), nodes))
    return begin, end


def _begin(context: Context, group: str, owned: Mapping[str, Ownership]) -> LocalProgram:
    """Each replica starts from the state of the step's start, or from zero where slices are added up."""
    writes = tuple(k for bucket in owned for keys in context.carried_keys(group, bucket) for k in keys)

    def body(env: dict[Key, Any]) -> dict[Key, Any]:
        specs = {key: local_spec(context, key) for key in writes}
        return {
            key: env[start] if (start := Key("state", group, key.item)) in env else jnp.zeros(spec.shape, spec.dtype)
            for key, spec in specs.items()
        }

    reads = tuple(dict.fromkeys(Key("state", group, k.item) for k in writes if context.is_in_turn(k.item)))
    return LocalProgram(label=f"carry {group}", reads=reads, writes=writes, body=body)


def _end(
    context: Context, group: str, owned: Mapping[str, Ownership], reductions: Iterable[StateCollective]
) -> LocalProgram:
    """What slices left is reduced, or has been with other groups, and becomes the state."""
    own = tuple(reductions)
    reduced = {key.item for c in own for key in c.writes}
    given: dict[int, Key] = {}
    for bucket in owned:
        joint = len(owned[bucket].owners) > 1 and carry_of(context.dag.buckets[bucket]) != "equal"
        for key, *_ in context.carried_keys(group, bucket):
            given[key.item] = key._replace(kind="carried_total") if joint else key

    def body(env: dict[Key, Any]) -> dict[Key, Any]:
        env = dict(env)
        if context.slices_on(group) > 1:
            for key in dict.fromkeys(k for k in given.values() if k.kind == "carried"):
                together = jax.lax.pmax if context.carry_of(key.item) == "equal" else jax.lax.psum
                env[key] = together(env[key], SLICE)
        for collective in own:
            collective.run(env)
        return {Key("state", group, leaf): finished(env, leaf) for leaf in given}

    def finished(env: Mapping[Key, Any], leaf: int) -> jax.Array:
        total = env[Key("carried_total", group, leaf)] if leaf in reduced else env[given[leaf]]
        counts = {"sequential": context.replicas, "mean": context.num_slices}
        count = counts.get(str(context.carry_of(leaf)), 1)
        return (total / count if count > 1 else total).astype(context.leaf_spec(leaf).dtype)

    return LocalProgram(
        label=f"carried {group}", reads=tuple(given.values()), writes=tuple(Key("state", group, i) for i in given),
        body=body,
    )  # fmt: skip
