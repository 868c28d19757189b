"""A completed DAG becomes a list of instructions on named registers: programs, transfers, exchanges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from piper_jax.ir.dag import Slot
from piper_jax.ir.ids import NodeId
from piper_jax.ir.linear import dispatch_order
from piper_jax.ir.nodes import Collective, Compute, Send, Update
from piper_jax.lowering.builder import Builder
from piper_jax.lowering.communication import exchange, joint_reduction, sent_keys, transfer
from piper_jax.lowering.context import Context, reduced_buckets
from piper_jax.lowering.fusion import fuse
from piper_jax.lowering.instruction import Instruction
from piper_jax.lowering.keys import ACCUMULATED, Key
from piper_jax.lowering.local_program import LocalProgram
from piper_jax.lowering.programs import Compiled, Compiler
from piper_jax.lowering.prologue import clocks, prologue
from piper_jax.lowering.slots import Step, step
from piper_jax.lowering.updates import group_updates


@dataclass(slots=True, kw_only=True)
class Lowering:
    """Builds the instructions of one context; compiles every program before anything runs."""

    builder: Builder
    slot_programs: dict[Any, Compiled] = field(default_factory=dict)

    @property
    def context(self) -> Context:
        return self.builder.context

    def instructions(self) -> list[Instruction]:
        """All instructions of a step, in dispatch order."""
        dag = self.context.dag
        order = fuse(dag, dispatch_order(dag), self._is_lowered)
        steps = {
            slot: [step(self.context, slot.group, n) for n in slot.nodes]
            for slot in order
            if isinstance(dag.nodes[slot.nodes[0]], Compute)
        }
        readers = self._outside_readers(order, steps)
        body = [i for slot in order for i in self._lower(slot, steps, readers)]
        metrics = dict.fromkeys(k for found in steps.values() for s in found for k in s.writes if k.kind == "metric")
        return [*prologue(self.builder, metrics), *body, *clocks(self.builder)]

    def reductions(self) -> list[Instruction]:
        """What takes the place of the updates when gradients are asked for: each group's reduction alone."""
        return [self.builder.local("reduce", g, update.reduction()) for g, update in self.builder.updates.items()]

    def _is_lowered(self, node: NodeId) -> bool:
        return self.context.training or node.PASS == "F"

    def _outside_readers(self, order: Sequence[Slot], steps: Mapping[Slot, list[Step]]) -> dict[Key, set[int]]:
        """For each key, the positions in ``order`` that read it, not counting the slot that writes it."""
        readers: dict[Key, set[int]] = {}
        for position, slot in enumerate(order):
            found = steps.get(slot, [])
            inside = {k for s in found for k in s.writes if k.kind not in ACCUMULATED}
            reads = [k for s in found for k in (*s.reads, *(w for w in s.writes if w.kind in ACCUMULATED))]
            for key in reads if found else self._sent(slot):
                if key not in inside:
                    readers.setdefault(key, set()).add(position)
        return readers

    def _sent(self, slot: Slot) -> list[Key]:
        sends = (n for n in slot.nodes if isinstance(self.context.dag.nodes[n], Send))
        return [k for n in sends for k in sent_keys(self.context, n)]

    def _lower(self, slot: Slot, steps: dict[Slot, list[Step]], readers: dict[Key, set[int]]) -> Iterable[Instruction]:
        node = self.context.dag.nodes[slot.nodes[0]]
        match node:
            case Compute():
                yield self._slot_instruction(slot, steps[slot], readers)
            case Send():
                yield transfer(self.builder, node)
            case Update() if str(node.group) in self.builder.updates and self.context.source.optimizer is not None:
                local = self.builder.updates[str(node.group)].round(node.round)
                yield self.builder.local("update", str(node.group), local, slot.nodes)
            case Collective() if node.kind == "all_gather" and not node.bucket:
                yield exchange(self.builder, node)
            case Collective() if reduced_buckets(node) and node.group not in self.context.meshes:
                yield joint_reduction(self.builder, node)
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
            self.slot_programs[signature] = self.builder.compile(slot.group, local)
        program = self.slot_programs[signature]
        return Instruction(
            role="compute", label=program.label, call=program, reads=tuple(reads), writes=writes, nodes=slot.nodes,
            program=program,
        )  # fmt: skip


def lower(context: Context, compiler: Compiler) -> Lowering:
    """The lowering of a context."""
    updates = group_updates(context) if context.training else {}
    return Lowering(builder=Builder(context=context, compiler=compiler, updates=updates))
