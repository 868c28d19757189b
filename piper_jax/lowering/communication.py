"""What moves between groups: transfers, joint gradient reductions, exchanges of update scalars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax import _jax_compat
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Send
from piper_jax.lowering.between_processes import by_position, is_by_position, permuted
from piper_jax.lowering.builder import Builder
from piper_jax.lowering.collectives import StateCollective
from piper_jax.lowering.context import Context
from piper_jax.lowering.group_mesh import JOINT_AXES, joint_mesh
from piper_jax.lowering.instruction import Instruction, Role
from piper_jax.lowering.keys import Key
from piper_jax.lowering.local_program import LocalProgram
from piper_jax.lowering.slots import local_spec

JOINT = "joint"


def sent_keys(context: Context, id: NodeId) -> list[Key]:
    """The registers that a Send reads, on its own group."""
    node = context.dag.nodes[id]
    assert isinstance(node, Send)
    mb, keys = id.MB or 0, []
    for name in node.values:
        if name.startswith("d "):
            item = (context.source.values[name[2:]], context.giver_of(id))
            keys.append(Key("cotangent", str(node.group), item, mb))
        else:
            keys.append(Key("value", str(node.group), context.source.values[name], mb))
    return keys


def transfer(builder: Builder, node: Send) -> Instruction:
    """Arrays move shard to shard from one group's devices to another's."""
    context = builder.context
    reads = tuple(sent_keys(context, node.id))
    writes = tuple(k._replace(group=node.peer) for k in reads)
    source, target, label = str(node.group), node.peer, f"{node.group}>{node.peer}"
    if not context.is_alone(source, target):
        return _between_processes(builder, label, reads, writes, (node.id, node.match))
    sharding = context.meshes[target].shardings["stacked"]
    alike = context.slices_on(source) == context.slices_on(target)
    return Instruction(
        role="transfer", label=label, reads=reads, writes=writes, nodes=(node.id, node.match),
        call=_jax_compat.mover(sharding) if alike else lambda *arrays: jax.device_put(list(arrays), sharding),
    )  # fmt: skip


def _between_processes(
    builder: Builder, label: str, reads: tuple[Key, ...], writes: tuple[Key, ...], nodes: tuple[NodeId, ...]
) -> Instruction:
    """What this process has of a transfer."""
    context, (source, target) = builder.context, (reads[0].group, writes[0].group)
    sent = reads if context.is_here(source) else ()
    received = writes if context.is_here(target) else ()
    if is_by_position(context, source, target):
        call = by_position(context, reads, target)
        return Instruction(role="transfer", label=label, reads=sent, writes=received, call=call, nodes=nodes)
    program, call = permuted(context, builder.compiler, label, reads, target)
    tokens = tuple(Key("token", g) for g in (source, target) if context.needs_tokens and context.is_here(g))
    return Instruction(
        role="transfer", label=label, reads=(*sent, *tokens), writes=received, nodes=nodes,
        call=builder.wire.ordered(lambda *arrays: call(*arrays[: len(sent)])), program=program,
    )  # fmt: skip


def exchange(builder: Builder, node: Collective) -> Instruction:
    """Every group learns what the optimizer's mixing equations read of the others."""
    exchanges = next(iter(builder.updates.values())).exchanges
    k = min(r for r in range(exchanges.rounds) if f"update scalars {r}" in node.values)
    return gathered_words(builder, "exchange", exchanges.participants, k, exchanges.width(k), (node.id,))


def gathered_words(
    builder: Builder, role: Role, groups: Sequence[str], item: Any, width: int, nodes: tuple[NodeId, ...] = ()
) -> Instruction:
    """Every device of all groups gets the ``[width]`` words of all of them, as ``[devices, width]``."""
    sent, taken = Key("exchange", JOINT, item), Key("gathered", JOINT, item)
    local = LocalProgram(
        label=f"exchange {item}", reads=(sent,), writes=(taken,),
        body=lambda env: {taken: jax.lax.all_gather(env[sent], JOINT_AXES)},
    )  # fmt: skip
    return _joint(builder, role, groups, local, [jax.ShapeDtypeStruct((width,), jnp.uint32)], nodes)


def joint_collective(builder: Builder, found: StateCollective) -> Instruction:
    """ONE collective on state over all devices of all its owners."""
    context = builder.context

    def body(env: dict[Key, Any]) -> dict[Key, Any]:
        found.run(env)
        return env

    local = LocalProgram(label=str(found.id), reads=found.reads, writes=found.writes, body=body)
    specs = [local_spec(context, k) for k in found.reads]
    donate = [k for k, s in enumerate(specs) if found.does == "reduce" and s == context.whole_spec(found.writes[k])]
    role = "update" if found.serves_update else "joint"
    nodes = (found.id,) if found.id in context.dag.nodes else ()
    return _joint(builder, role, found.owned.owners, local, specs, nodes, donate)


def _joint(
    builder: Builder, role: Role, groups: Sequence[str], local: LocalProgram, specs: Sequence[jax.ShapeDtypeStruct],
    nodes: tuple[NodeId, ...], donate: Sequence[int] = (),
) -> Instruction:  # fmt: skip
    """A program on several groups side by side. Its stacked inputs are theirs, each output is given to each of them.

    Where nothing else keeps programs in order it is dispatched once its inputs are there, so that no device still has
    others before it.

    Args:
      local: its keys name the joint group; those of the instruction name the members.
      specs: of its inputs, on one device.
    """
    context = builder.context
    joint = joint_mesh([context.meshes[g] for g in groups])
    if context.needs_tokens:
        local, specs = local.chained(JOINT), [*specs, local_spec(context, Key("token", JOINT))]
    rows = sum(context.meshes[g].replicas for g in groups)
    own = [[context.partition(k._replace(group=groups[0])) for k in keys] for keys in (local.reads, local.writes)]

    def body(*arrays: Any) -> list[Any]:
        out = local.body({key: a[0] for key, a in zip(local.reads, arrays, strict=True)})
        return [out[k][None] if k.layout == "stacked" else out[k] for k in local.writes]

    program = builder.compiler.compile(
        body, label=local.label, mesh=joint.mesh,
        specs=[jax.ShapeDtypeStruct((rows, *s.shape), s.dtype) for s in specs],
        in_specs=[joint.stacked(p) for p in own[0]],
        out_specs=[joint.stacked(p) if k.layout == "stacked" else p for k, p in zip(local.writes, own[1], strict=True)],
        donate=donate,
    )  # fmt: skip

    waits = not (context.has_streams or context.needs_tokens)
    here = [g for g in groups if context.is_here(g)]

    def call(*arrays: jax.Array) -> list[jax.Array]:
        if waits:
            jax.block_until_ready(arrays)
        results = program(*(joint.join(arrays[k :: len(specs)], p, rows) for k, p in enumerate(own[0])))
        split = [
            joint.split(r, [context.sharding(k._replace(group=g)) for g in groups], stacked=k.layout == "stacked")
            for r, k in zip(results, local.writes, strict=True)
        ]
        return [array for per_group in zip(*split, strict=True) for array in per_group]

    return Instruction(
        role=role, label=program.label, nodes=nodes, program=program,
        call=call if context.is_alone(*groups) else builder.wire.ordered(call),
        overwrites=tuple(local.reads[k]._replace(group=g) for g in here for k in donate),
        reads=tuple(k._replace(group=g) for g in here for k in local.reads),
        writes=tuple(k._replace(group=g) for g in here for k in local.writes),
    )  # fmt: skip
