"""A completed DAG becomes a flat list of instructions on numbered registers: programs, transfers, exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp

from piper_jax.ir.dag import Slot
from piper_jax.ir.ids import NodeId
from piper_jax.ir.linear import dispatch_order
from piper_jax.ir.nodes import Collective, Compute, Send, Update
from piper_jax.lowering.context import Context
from piper_jax.lowering.fusion import fuse
from piper_jax.lowering.group_mesh import JOINT_AXES, PARTITION, REPLICA_AXES, P, joint_mesh
from piper_jax.lowering.keys import DONATED, Key
from piper_jax.lowering.programs import Compiled, Compiler
from piper_jax.lowering.slots import Step, batch_key, local_spec, step
from piper_jax.lowering.updates import GroupUpdate, LocalProgram, flat_sum, group_updates, joint_reductions
from piper_jax.tracing.flat import read

Role = Literal["prologue", "compute", "transfer", "reduce", "joint", "update", "exchange"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One dispatch: ``call(*registers in reads) -> values for writes``; ``program`` is set where XLA runs."""

    role: Role
    label: str
    call: Callable[..., Sequence[Any]]
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    nodes: tuple[NodeId, ...] = ()
    program: Compiled | None = None


@dataclass(slots=True, kw_only=True)
class Lowering:
    """Builds the instructions of one context; compiles every program before anything runs."""

    context: Context
    compiler: Compiler
    updates: dict[str, GroupUpdate] = field(default_factory=dict)
    slot_programs: dict[Any, Compiled] = field(default_factory=dict)

    def instructions(self) -> list[Instruction]:
        """All instructions of a step, in dispatch order."""
        order = fuse(self.context.dag, dispatch_order(self.context.dag), self._is_lowered)
        if self.context.training:
            self.updates = group_updates(self.context)
        steps = {
            slot: [step(self.context, slot.group, n) for n in slot.nodes] for slot in order if self._is_compute(slot)
        }
        readers = self._outside_readers(order, steps)
        body = [i for slot in order for i in self._lower(slot, steps, readers)]
        return [*self._prologue(steps), *body, *self._clocks()]

    # -- slots ---------------------------------------------------------------------------------------
    def _is_compute(self, slot: Slot) -> bool:
        return isinstance(self.context.dag.nodes[slot.nodes[0]], Compute)

    def _is_lowered(self, node: NodeId) -> bool:
        return self.context.training or node.PASS == "F"

    def _outside_readers(self, order: Sequence[Slot], steps: dict[Slot, list[Step]]) -> dict[Key, set[int]]:
        """For each key, the positions in ``order`` that read it, not counting the slot that writes it."""
        readers: dict[Key, set[int]] = {}
        for position, slot in enumerate(order):
            found = steps.get(slot, [])
            inside = {k for s in found for k in s.writes if k.kind not in DONATED}
            reads = [k for s in found for k in (*s.reads, *(w for w in s.writes if w.kind in DONATED))]
            for key in reads if found else [k for n in slot.nodes for k in self._sent(n)]:
                if key not in inside:
                    readers.setdefault(key, set()).add(position)
        return readers

    def _lower(self, slot: Slot, steps: dict[Slot, list[Step]], readers: dict[Key, set[int]]) -> Iterable[Instruction]:
        node = self.context.dag.nodes[slot.nodes[0]]
        match node:
            case Compute():
                yield self._slot_instruction(slot, steps[slot], readers)
            case Send():
                yield self._transfer(node)
            case Update() if str(node.group) in self.updates:
                local = self.updates[str(node.group)].round(node.round)
                yield self._local("update", str(node.group), local, slot.nodes)
            case Collective() if node.kind == "all_gather" and not node.bucket:
                yield self._exchange(node)
            case Collective() if node.kind == "all_reduce" and node.group not in self.context.meshes:
                yield self._joint_reduction(node)
            case _:
                return

    def _slot_instruction(self, slot: Slot, steps: list[Step], readers: dict[Key, set[int]]) -> Instruction:
        written: dict[Key, None] = {}
        reads: dict[Key, None] = {}
        for s in steps:
            reads.update(dict.fromkeys(k for k in s.reads if k not in written))
            written.update(dict.fromkeys(s.writes))
        writes = tuple(k for k in written if readers.get(k))
        local_mb = {mb: k for k, mb in enumerate(dict.fromkeys(s.mb for s in steps))}
        signature = (
            slot.group,
            tuple((n.op, n.PASS, local_mb[n.MB or 0]) for n in slot.nodes),
            tuple((k._replace(mb=None), local_mb.get(k.mb)) for k in writes),  # type: ignore[arg-type]
        )
        if signature not in self.slot_programs:
            label = " ".join(f"{n.PASS}{n.PP if n.PP is not None else ''}" for n in slot.nodes) + f" {slot.group}"

            def body(env: dict[Key, Any]) -> dict[Key, Any]:
                for s in steps:
                    s.run(env)
                return env

            local = LocalProgram(label=label, reads=tuple(reads), writes=writes, body=body)
            self.slot_programs[signature] = self._compile(slot.group, local)
        program = self.slot_programs[signature]
        return Instruction(
            role="compute", label=program.label, call=program.call, reads=tuple(reads), writes=writes, nodes=slot.nodes,
            program=program,
        )  # fmt: skip

    # -- programs --------------------------------------------------------------------------------------
    def _local(self, role: Role, group: str, local: LocalProgram, nodes: tuple[NodeId, ...] = ()) -> Instruction:
        program = self._compile(group, local)
        return Instruction(
            role=role, label=local.label, call=program.call, reads=local.reads, writes=local.writes, nodes=nodes,
            program=program,
        )  # fmt: skip

    def _compile(self, group: str, local: LocalProgram) -> Compiled:
        mesh = self.context.meshes[group]
        donate = [
            k for k, key in enumerate(local.reads)
            if key.kind in DONATED or (key.kind in ("state", "optimizer", "step") and key in local.writes)
        ]  # fmt: skip

        def body(*args: Any) -> list[Any]:
            env = {key: _local_view(key, a) for key, a in zip(local.reads, args, strict=True)}
            out = local.body(env)
            return [_global_view(key, out[key]) for key in local.writes]

        return self.compiler.compile(
            body, label=local.label, mesh=mesh.mesh, specs=[self.global_spec(k) for k in local.reads],
            in_specs=[PARTITION[k.layout] for k in local.reads], out_specs=[PARTITION[k.layout] for k in local.writes],
            donate=donate,
        )  # fmt: skip

    def global_spec(self, key: Key) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a register."""
        replicas = self.context.replicas
        if key.kind == "gathered":
            update = self.updates[key.group]
            rows = replicas * len(update.participants)
            return jax.ShapeDtypeStruct((rows, update.exchange_width(key.item)), jnp.uint32)
        local = local_spec(self.context, key)
        match key.layout:
            case "stacked":
                return jax.ShapeDtypeStruct((replicas, *local.shape), local.dtype)
            case "batch":
                return jax.ShapeDtypeStruct((local.shape[0], replicas, *local.shape[1:]), local.dtype)
            case _:
                return local

    # -- communication between groups ---------------------------------------------------------------------
    def _sent(self, id: NodeId) -> list[Key]:
        node = self.context.dag.nodes[id]
        if not isinstance(node, Send) or not self._is_lowered(id):
            return []
        mb, keys = id.MB or 0, []
        producer = next(e.src for e in self._edges_into(id))
        for name in node.values:
            if name.startswith("d "):
                item = (self.context.source.values[name[2:]], producer.op)
                keys.append(Key("cotangent", str(node.group), item, mb))
            else:
                keys.append(Key("value", str(node.group), self.context.source.values[name], mb))
        return keys

    def _edges_into(self, id: NodeId) -> list[Any]:
        incoming = self.context.dag.memo.get("lowering incoming")
        if incoming is None:
            incoming = self.context.dag.memo["lowering incoming"] = {}
            for edge in self.context.dag.data:
                incoming.setdefault(edge.dst, []).append(edge)
        return incoming[id]

    def _transfer(self, node: Send) -> Instruction:
        reads = tuple(self._sent(node.id))
        writes = tuple(k._replace(group=node.peer) for k in reads)
        target = self.context.meshes[node.peer].shardings["stacked"]
        return Instruction(
            role="transfer", label=f"{node.group}>{node.peer}", call=_Transfer(target), reads=reads, writes=writes,
            nodes=(node.id, node.match),
        )  # fmt: skip

    def _exchange(self, node: Collective) -> Instruction:
        update = next(iter(self.updates.values()))
        joint = joint_mesh([self.context.meshes[g] for g in update.participants])
        k = min(r for r in range(update.rounds) if f"update scalars {r}" in node.values)
        rows = self.context.replicas * len(joint.members)
        spec = jax.ShapeDtypeStruct((rows, update.exchange_width(k)), jnp.uint32)
        program = self.compiler.compile(
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

    def _joint_reduction(self, node: Collective) -> Instruction:
        context = self.context
        owners, leaves = next(
            (o, found)
            for o, found in joint_reductions(context)
            if found == context.source.bucket_leaves[str(node.bucket)]
        )
        joint = joint_mesh([context.meshes[g] for g in owners])
        specs = [
            jax.ShapeDtypeStruct((context.replicas * len(owners), *s.shape), s.dtype)
            for s in map(context.accumulator_spec, leaves)
        ]

        def body(*arrays: Any) -> list[Any]:
            sums = flat_sum([a[0] for a in arrays], (joint.stacked.spec[0]))
            gradients = [s.astype(context.leaf_spec(i).dtype) for i, s in zip(leaves, sums, strict=True)]
            return [*gradients, *(jnp.zeros_like(a) for a in arrays)]

        program = self.compiler.compile(
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

    # -- before and after ------------------------------------------------------------------------------------
    def _prologue(self, steps: dict[Slot, list[Step]]) -> Iterable[Instruction]:
        """Metric accumulators are zeroed; the weight of a WeightedLoss is summed before the first backward seed."""
        metrics = dict.fromkeys(k for found in steps.values() for s in found for k in s.writes if k.kind == "metric")
        for group in self.context.meshes:
            own = tuple(k for k in metrics if k.group == group)
            if own:
                specs = {k: local_spec(self.context, k) for k in own}
                zeros = LocalProgram(
                    label=f"zero metrics {group}", reads=(), writes=own,
                    body=lambda env, specs=specs: {k: jnp.zeros(s.shape, s.dtype) for k, s in specs.items()},
                )  # fmt: skip
                yield self._local("prologue", group, zeros)
            if any(isinstance(k.item, tuple) and k.item[0] == "total" for k in own):
                yield self._local("prologue", group, self._weight(group))

    def _weight(self, group: str) -> LocalProgram:
        program, context = self.context.program, self.context
        eqns = program.flat.needed([program.weight] if isinstance(program.weight, int) else [])
        used = {a for i in eqns for a in program.flat.eqns[i].reads()} | {program.weight}
        leaves = [i for i in range(program.num_batch) if program.batch_input(i) in used]
        keys = tuple(batch_key(context, group, i) for i in leaves)
        out = Key("seed", group)

        def one(index: Any, env: dict[Key, Any]) -> Any:
            values = dict(program.flat.consts)
            for leaf, key in zip(leaves, keys, strict=True):
                row = (
                    env[key]
                    if key.kind == "shared"
                    else jax.lax.dynamic_index_in_dim(env[key], index, 0, keepdims=False)
                )
                values[program.batch_input(leaf)] = row
            program.flat.run((program.flat.eqns[i] for i in eqns), values)
            return jnp.asarray(read(program.weight, values)).astype(local_spec(context, out).dtype)  # type: ignore[arg-type]

        def body(env: dict[Key, Any]) -> dict[Key, Any]:
            weights = jax.lax.map(lambda m: one(m, env), jnp.arange(context.num_microbatches))
            return {out: 1.0 / jax.lax.psum(weights.sum(), REPLICA_AXES)}

        return LocalProgram(label=f"weight {group}", reads=keys, writes=(out,), body=body)

    def reductions(self) -> list[Instruction]:
        """What takes the place of the updates when gradients are asked for: each group's reduction alone."""
        return [self._local("reduce", group, update.reduction()) for group, update in self.updates.items()]

    def _clocks(self) -> Iterable[Instruction]:
        """Groups that update nothing still count the steps."""
        if self.context.source.optimizer is None or not self.context.training:
            return
        for group in self.context.meshes:
            if group not in self.updates:
                key = Key("step", group)
                advance = LocalProgram(
                    label=f"clock {group}",
                    reads=(key,),
                    writes=(key,),
                    body=lambda env: {k: v + 1 for k, v in env.items()},
                )
                yield self._local("update", group, advance)


@dataclass(frozen=True, slots=True)
class _Transfer:
    target: Any

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        return jax.device_put(list(arrays), self.target)


def _local_view(key: Key, array: Any) -> Any:
    return array[0] if key.layout == "stacked" else array[:, 0] if key.layout == "batch" else array


def _global_view(key: Key, value: Any) -> Any:
    return jnp.asarray(value)[None] if key.layout == "stacked" else value


def last_uses(instructions: Sequence[Instruction], kept: Iterable[Key]) -> list[tuple[Key, ...]]:
    """For each instruction, the registers that nothing reads after it and that are not ``kept``."""
    seen = set(kept)
    frees: list[tuple[Key, ...]] = []
    for instruction in reversed(instructions):
        touched = dict.fromkeys((*instruction.reads, *instruction.writes))
        frees.append(tuple(k for k in touched if k not in seen))
        seen.update(touched)
    return frees[::-1]
