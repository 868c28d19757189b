"""What moves between groups: transfers, joint gradient reductions, exchanges of update scalars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Send
from piper_jax.lowering.builder import Builder
from piper_jax.lowering.collectives import StateCollective
from piper_jax.lowering.context import Context
from piper_jax.lowering.group_mesh import JOINT_AXES, P, joint_mesh
from piper_jax.lowering.instruction import Instruction
from piper_jax.lowering.keys import Key
from piper_jax.lowering.slots import local_spec


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
    context, exchanges = builder.context, next(iter(builder.updates.values())).exchanges
    joint = joint_mesh([context.meshes[g] for g in exchanges.participants])
    k = min(r for r in range(exchanges.rounds) if f"update scalars {r}" in node.values)
    rows = context.replicas * len(joint.members)
    spec = jax.ShapeDtypeStruct((rows, exchanges.width(k)), jnp.uint32)
    program = builder.compiler.compile(
        lambda x: [jax.lax.all_gather(x[0], JOINT_AXES)], label=f"exchange {k}", mesh=joint.mesh, specs=[spec],
        in_specs=[joint.stacked.spec], out_specs=[P()],
    )  # fmt: skip

    def call(*arrays: jax.Array) -> list[jax.Array]:
        (gathered,) = program(joint.join(arrays))
        return joint.split(gathered)

    return Instruction(
        role="exchange", label=program.label, call=call, nodes=(node.id,), program=program,
        reads=tuple(Key("exchange", g, k) for g in exchanges.participants),
        writes=tuple(Key("gathered", g, k) for g in exchanges.participants),
    )  # fmt: skip


def joint_collective(builder: Builder, found: StateCollective) -> Instruction:
    """ONE collective on state over all devices of all its owners."""
    context, owners = builder.context, found.owned.owners
    joint = joint_mesh([context.meshes[g] for g in owners])
    specs = [local_spec(context, k) for k in found.reads]
    rows = context.replicas * len(owners)
    partition = {"stacked": joint.stacked.spec, "replicated": P()}

    def body(*arrays: Any) -> list[Any]:
        env = {key: a[0] for key, a in zip(found.reads, arrays, strict=True)}
        found.run(env)
        return [env[k][None] if k.layout == "stacked" else env[k] for k in found.writes]

    program = builder.compiler.compile(
        body, label=str(found.id), mesh=joint.mesh,
        specs=[jax.ShapeDtypeStruct((rows, *s.shape), s.dtype) for s in specs],
        in_specs=[joint.stacked.spec] * len(specs), out_specs=[partition[k.layout] for k in found.writes],
        donate=[k for k, s in enumerate(specs) if found.does == "reduce" and s == context.whole_spec(found.writes[k])],
    )  # fmt: skip

    def call(*arrays: jax.Array) -> list[jax.Array]:
        results = program(*(joint.join(arrays[k :: len(specs)]) for k in range(len(specs))))
        split = [joint.split(r, k.layout) for r, k in zip(results, found.writes, strict=True)]
        return [array for per_owner in zip(*split, strict=True) for array in per_owner]

    nodes = (found.id,) if found.id in context.dag.nodes else ()
    return Instruction(
        role="update" if found.serves_update else "joint", label=program.label, call=call, nodes=nodes,
        program=program, reads=tuple(k._replace(group=g) for g in owners for k in found.reads),
        writes=tuple(k._replace(group=g) for g in owners for k in found.writes),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Transfer:
    target: Any

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        return jax.device_put(list(arrays), self.target)
