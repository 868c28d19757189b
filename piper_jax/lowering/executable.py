"""A completed DAG becomes a list of instructions on named registers: programs, transfers, exchanges."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from piper_jax.ir.dag import Slot
from piper_jax.ir.fusion import fuse, is_member, programs
from piper_jax.ir.ids import NodeId
from piper_jax.ir.linear import dispatch_order
from piper_jax.ir.nodes import Collective, Send, Update
from piper_jax.lowering.between_processes import Wire
from piper_jax.lowering.builder import Builder
from piper_jax.lowering.carried import carried_state
from piper_jax.lowering.collectives import StateCollective, state_collectives
from piper_jax.lowering.communication import exchange, joint_collective, sent_keys, transfer
from piper_jax.lowering.context import Context
from piper_jax.lowering.instruction import Instruction
from piper_jax.lowering.keys import ACCUMULATED, Key
from piper_jax.lowering.local_program import LocalProgram
from piper_jax.lowering.metric_exchange import metric_exchange
from piper_jax.lowering.pair import Member, found_pair
from piper_jax.lowering.programs import Compiled, Compiler
from piper_jax.lowering.prologue import clocks, prologue
from piper_jax.lowering.same_program import same_program
from piper_jax.lowering.slots import step
from piper_jax.lowering.token_exchange import TokenExchange, token_exchanges
from piper_jax.lowering.updates import group_updates, whole_gradients

_KEPT = ACCUMULATED | {"accumulator_shard", "gradient", "gradient_shard", "carried"}


@dataclass(kw_only=True)
class Lowering:
    """Builds the instructions of one context; compiles every program before anything runs."""

    builder: Builder
    collectives: Mapping[NodeId, StateCollective]
    exchanges: Mapping[NodeId, TokenExchange]
    slot_programs: dict[Any, Compiled] = field(default_factory=dict)

    @property
    def context(self) -> Context:
        return self.builder.context

    def instructions(self) -> list[Instruction]:
        """All instructions of a step, in dispatch order."""
        dag = self.context.dag
        order = programs(dag) if self.context.training else fuse(dag, dispatch_order(dag), self._is_lowered)
        begun: set[Key] = set()
        own = [s for s in order if is_member(dag, s.nodes[0]) and self.context.is_here(s.group)]
        steps = {slot: [self.member(n, begun) for n in slot.nodes] for slot in own}
        needed = self._needed(order, steps)
        body = [i for slot in order for i in self._lower(slot, steps, needed)]
        metrics = dict.fromkeys(k for found in steps.values() for s in found for k in s.writes if k.kind == "metric")
        begin, end = carried_state(self.builder, self.collectives)
        shared = metric_exchange(self.builder) if self.context.process is not None else []
        return [*prologue(self.builder, metrics), *begin, *body, *end, *shared, *clocks(self.builder)]

    def reductions(self) -> list[Instruction]:
        """What takes the place of the updates when gradients are asked for: each group's reduction alone.

        Gradients that several groups keep in shards are gathered over them.
        """
        updates = self.builder.updates
        own = ((g, u.reduction()) for g, u in updates.items() if self.context.is_here(g))
        alone = [self.builder.local("reduce", g, reduction) for g, reduction in own if reduction.writes]
        joint: dict[str, set[int]] = {}
        for leaf, owned in self.context.owned_leaf.items():
            if len(owned.owners) > 1:
                joint.setdefault(owned.group.name, set()).add(leaf)
        gathers = [c for g, leaves in joint.items() for c in whole_gradients(self.context, g, sorted(leaves))]
        return [*alone, *(joint_collective(self.builder, c) for c in gathers if self._is_here(c.owned.owners))]

    def _updates(self, group: str) -> bool:
        has_optimizer = self.context.source.optimizer is not None
        return has_optimizer and group in self.builder.updates and self.context.is_here(group)

    def _is_here(self, groups: Iterable[str]) -> bool:
        return any(self.context.is_here(g) for g in groups)

    def _is_lowered(self, node: NodeId) -> bool:
        """Whether a node runs when evaluating: forward passes and the gathers that serve them."""
        return node in self._gathers_of_forward if node in self.collectives else node.PASS == "F"

    @cached_property
    def _gathers_of_forward(self) -> frozenset[NodeId]:
        return frozenset(e.src for e in self.context.dag.data if e.dst.PASS == "F")

    def member(self, node: NodeId, begun: set[Key]) -> Member:
        """A node as a function of local arrays: see :func:`piper_jax.lowering.slots.step` for ``begun``."""
        found = self.collectives.get(node) or self.exchanges.get(node)
        return found or step(self.context, str(self.context.dag.nodes[node].group), node, begun)

    def _needed(self, order: Sequence[Slot], steps: Mapping[Slot, Sequence[Member]]) -> dict[Slot, set[Key]]:
        """What each program writes that another one reads before it is written anew, or that is kept in any case."""
        needed: dict[Slot, set[Key]] = {}
        live: set[Key] = set()
        for slot in reversed(order):
            if slot not in steps:
                live.update(self._read(slot))
                continue
            reads, writes = _touched(steps[slot])
            needed[slot] = {k for k in writes if k in live or k.kind in _KEPT}
            live.difference_update(writes)
            live.update(reads)
        return needed

    def _read(self, slot: Slot) -> list[Key]:
        """What a transfer or a joint collective reads."""
        joint = [c for n in slot.nodes if (c := self.collectives.get(n)) is not None]
        shared = [k._replace(group=owner) for c in joint for owner in c.owned.owners for k in c.reads]
        return [*self._sent(slot), *shared]

    def _sent(self, slot: Slot) -> list[Key]:
        sends = (n for n in slot.nodes if isinstance(self.context.dag.nodes[n], Send))
        return [k for n in sends for k in sent_keys(self.context, n)]

    def _lower(
        self, slot: Slot, steps: Mapping[Slot, Sequence[Member]], needed: Mapping[Slot, set[Key]]
    ) -> Iterable[Instruction]:
        node = self.context.dag.nodes[slot.nodes[0]]
        match node:
            case _ if slot in steps:
                yield self._slot_instruction(slot, steps[slot], needed[slot])
            case _ if is_member(self.context.dag, node.id):
                return
            case Send() if self._is_here((str(node.group), node.peer)):
                yield transfer(self.builder, node)
            case Update() if self._updates(str(node.group)):
                local = self.builder.updates[str(node.group)].round(node.round)
                yield self.builder.local("update", str(node.group), local, slot.nodes)
            case Collective() if node.id in self.collectives:
                found = self.collectives[node.id]
                if found.group not in self.context.meshes and self._is_here(found.owned.owners):
                    yield joint_collective(self.builder, found)
            case Collective() if node.kind == "all_gather" and self._is_here(self.builder.updates):
                yield exchange(self.builder, node)
            case _:
                return

    def _slot_instruction(self, slot: Slot, steps: Sequence[Member], needed: Collection[Key]) -> Instruction:
        reads, written = _touched(steps)
        writes = tuple(k for k in written if k in needed)
        keys = (*reads, *writes)
        mbs = dict.fromkeys([*(s.mb for s in steps), *(k.mb for k in keys)])
        local_mb = {mb: k for k, mb in enumerate(mbs)}
        signature = (
            slot.group,
            tuple((n.op, n.PASS, local_mb[n.MB or 0]) for n in slot.nodes),
            tuple((k._replace(mb=None), local_mb[k.mb]) for k in keys),
            len(writes),
        )
        if signature not in self.slot_programs:
            label = " ".join(s.word for s in steps) + f" {slot.group}"

            pair = found_pair(self.context, steps)
            same = same_program(self.context, steps, tuple(reads), writes) if pair is None else None

            def body(env: dict[Key, Any]) -> dict[Key, Any]:
                if pair is not None:
                    return pair.run(env)
                for s in steps:
                    s.run(env)
                return env

            local = LocalProgram(label=label, reads=tuple(reads), writes=writes, body=body)
            local = local.chained(slot.group) if self.context.needs_tokens else local
            self.slot_programs[signature] = self.builder.compile(slot.group, local, same)
        program = self.slot_programs[signature]
        token = (Key("token", slot.group),) if self.context.needs_tokens else ()
        return Instruction(
            role="compute", label=program.label, call=program, reads=(*reads, *token), writes=(*writes, *token),
            nodes=slot.nodes, program=program, overwrites=self.builder.overwritten(reads, writes),
        )  # fmt: skip


def lower(context: Context, compiler: Compiler) -> Lowering:
    """The lowering of a context."""
    collectives = state_collectives(context)
    updates = group_updates(context, collectives.values()) if context.training else {}
    builder = Builder(context=context, compiler=compiler, updates=updates, wire=Wire(waits=not context.has_streams))
    return Lowering(builder=builder, collectives=collectives, exchanges=token_exchanges(context))


def _touched(steps: Sequence[Member]) -> tuple[dict[Key, None], dict[Key, None]]:
    """What a program reads and does not write before, and what it writes, in order."""
    reads: dict[Key, None] = {}
    written: dict[Key, None] = {}
    for s in steps:
        reads.update(dict.fromkeys(k for k in s.reads if k not in written))
        written.update(dict.fromkeys(s.writes))
    return reads, written
