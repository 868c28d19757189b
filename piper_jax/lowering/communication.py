"""What moves between groups: transfers, joint gradient reductions, exchanges of update scalars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Send
from piper_jax.lowering.builder import Builder
from piper_jax.lowering.context import Context, reduced_buckets
from piper_jax.lowering.group_mesh import JOINT_AXES, OWNER, REPLICA_AXES, P, joint_mesh
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
        (gathered,) = program(joint.join(arrays))
        return joint.split(gathered)

    return Instruction(
        role="exchange", label=program.label, call=call, nodes=(node.id,), program=program,
        reads=tuple(Key("exchange", g, k) for g in update.participants),
        writes=tuple(Key("gathered", g, k) for g in update.participants),
    )  # fmt: skip


def joint_reduction(builder: Builder, node: Collective) -> Instruction:
    """ONE gradient reduction over all devices of all owners of the buckets."""
    context, buckets = builder.context, reduced_buckets(node)
    owners = context.owners[buckets[0]]
    leaves = [leaf for bucket in buckets for leaf in context.source.bucket_leaves[bucket]]
    joint = joint_mesh([context.meshes[g] for g in owners])
    accumulated = [context.accumulator_spec(leaf) for leaf in leaves]
    rows = context.replicas * len(owners)

    def body(*arrays: Any) -> list[Any]:
        sums = flat_sum([a[0] for a in arrays], (OWNER, *REPLICA_AXES))
        return [s.astype(context.leaf_spec(i).dtype) for i, s in zip(leaves, sums, strict=True)]

    program = builder.compiler.compile(
        body, label=f"reduce {'+'.join(buckets)}", mesh=joint.mesh,
        specs=[jax.ShapeDtypeStruct((rows, *s.shape), s.dtype) for s in accumulated],
        in_specs=[joint.stacked.spec] * len(leaves), out_specs=[P()] * len(leaves),
        donate=[k for k, s in enumerate(accumulated) if s.dtype == context.leaf_spec(leaves[k]).dtype],
    )  # fmt: skip

    def call(*arrays: jax.Array) -> list[jax.Array]:
        sums = program(*(joint.join(arrays[k :: len(leaves)]) for k in range(len(leaves))))
        return [found for per_owner in zip(*map(joint.split, sums), strict=True) for found in per_owner]

    return Instruction(
        role="joint", label=program.label, call=call, nodes=(node.id,), program=program,
        reads=tuple(Key("accumulator", g, i) for g in owners for i in leaves),
        writes=tuple(Key("gradient", g, i) for g in owners for i in leaves),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Transfer:
    target: Any

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        return jax.device_put(list(arrays), self.target)
