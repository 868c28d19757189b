"""What moves between groups: transfers, joint gradient reductions, exchanges of update scalars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Send
from piper_jax.lowering.builder import Builder
from piper_jax.lowering.context import Context
from piper_jax.lowering.group_mesh import JOINT_AXES, P, joint_mesh
from piper_jax.lowering.instruction import Instruction
from piper_jax.lowering.keys import Key
from piper_jax.lowering.updates import flat_sum


def sent_keys(context: Context, id: NodeId) -> list[Key]:
    """The registers that a Send reads, on its own group."""
    node = context.dag.nodes[id]
    assert isinstance(node, Send)
    mb, keys = id.MB or 0, []
    for name in node.values:
        if name.startswith("d "):
            item = (context.source.values[name[2:]], context.producer_of(id).op)
            keys.append(Key("cotangent", str(node.group), item, mb))
        else:
            keys.append(Key("value", str(node.group), context.source.values[name], mb))
    return keys


def transfer(builder: Builder, node: Send) -> Instruction:
    """Arrays move shard to shard from one group's devices to another's."""
    context = builder.context
    reads = tuple(sent_keys(context, node.id))
    writes = tuple(k._replace(group=node.peer) for k in reads)
    target = context.meshes[node.peer].shardings["stacked"]
    return Instruction(
        role="transfer", label=f"{node.group}>{node.peer}", call=_Transfer(target), reads=reads, writes=writes,
        nodes=(node.id, node.match),
    )  # fmt: skip


def exchange(builder: Builder, node: Collective) -> Instruction:
    """Every group learns what the optimizer's mixing equations read of the others."""
    context = builder.context
    update = next(iter(builder.updates.values()))
    joint = joint_mesh([context.meshes[g] for g in update.participants])
    k = min(r for r in range(update.rounds) if f"update scalars {r}" in node.values)
    rows = context.replicas * len(joint.members)
    spec = jax.ShapeDtypeStruct((rows, update.exchange_width(k)), jnp.uint32)
    program = builder.compiler.compile(
        lambda x: [jax.lax.all_gather(x[0], JOINT_AXES)], label=f"exchange {k}", mesh=joint.mesh, specs=[spec],
        in_specs=[joint.stacked.spec], out_specs=[P()],
    )  # fmt: skip

    def call(*arrays: jax.Array) -> list[jax.Array]:
        (gathered,) = program.call(joint.join(arrays))
        return joint.split(gathered)

    return Instruction(
        role="exchange", label=program.label, call=call, nodes=(node.id,), program=program,
        reads=tuple(Key("exchange", g, k) for g in update.participants),
        writes=tuple(Key("gathered", g, k) for g in update.participants),
    )  # fmt: skip


def joint_reduction(builder: Builder, node: Collective) -> Instruction:
    """ONE gradient reduction of a bucket over all devices of all its owners."""
    context = builder.context
    owners, leaves = context.owners[str(node.bucket)], context.source.bucket_leaves[str(node.bucket)]
    joint = joint_mesh([context.meshes[g] for g in owners])
    specs = [
        jax.ShapeDtypeStruct((context.replicas * len(owners), *s.shape), s.dtype)
        for s in map(context.accumulator_spec, leaves)
    ]

    def body(*arrays: Any) -> list[Any]:
        sums = flat_sum([a[0] for a in arrays], (joint.stacked.spec[0]))
        gradients = [s.astype(context.leaf_spec(i).dtype) for i, s in zip(leaves, sums, strict=True)]
        return [*gradients, *(jnp.zeros_like(a) for a in arrays)]

    program = builder.compiler.compile(
        body, label=f"reduce {node.bucket}", mesh=joint.mesh, specs=specs, in_specs=[joint.stacked.spec] * len(leaves),
        out_specs=[*[P()] * len(leaves), *[joint.stacked.spec] * len(leaves)], donate=range(len(leaves)),
    )  # fmt: skip

    def call(*arrays: jax.Array) -> list[jax.Array]:
        results = program.call(*(joint.join(arrays[k :: len(leaves)]) for k in range(len(leaves))))
        gradients = [joint.split(r) for r in results[: len(leaves)]]
        zeros = [joint.unstack(r) for r in results[len(leaves) :]]
        return [found[o] for o in range(len(owners)) for found in (*gradients, *zeros)]

    return Instruction(
        role="joint", label=program.label, call=call, nodes=(node.id,), program=program,
        reads=tuple(Key("accumulator", g, i) for g in owners for i in leaves),
        writes=tuple(Key(kind, g, i) for g in owners for kind in ("gradient", "accumulator") for i in leaves),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Transfer:
    target: Any

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        return jax.device_put(list(arrays), self.target)
