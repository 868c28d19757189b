"""Gradient reduction and optimizer update of one group: one program a round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.ir.device_groups import REPLICA_AXES
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Update
from piper_jax.ir.ownership import Ownership
from piper_jax.lowering.collectives import StateCollective
from piper_jax.lowering.context import Context
from piper_jax.lowering.exchange import Exchanges
from piper_jax.lowering.group_mesh import OWNER
from piper_jax.lowering.keys import Key
from piper_jax.lowering.local_program import LocalProgram
from piper_jax.lowering.shards import Shard, ShardEvaluation
from piper_jax.lowering.slots import local_spec
from piper_jax.tracing.local_experts import EXPERT_AXIS
from piper_jax.tracing.optimizer_program import OptimizerProgram


@dataclass(frozen=True, kw_only=True)
class GroupUpdate:
    """What one group reduces and updates.

    Attributes:
      leaves: trainable state leaves on this group.
      before: its own collectives that the first round does: reductions, and gathers for updates of whole leaves.
      after: those that the last round does: gathers of updated parameters.
      elsewhere: leaves whose gradients are reduced before the first round, in a slot or with other groups.
    """

    context: Context
    group: str
    leaves: tuple[int, ...]
    before: tuple[StateCollective, ...]
    after: tuple[StateCollective, ...]
    elsewhere: frozenset[int]
    exchanges: Exchanges

    # -- keys ------------------------------------------------------------------------------------------
    @property
    def optimizer_keys(self) -> tuple[Key, ...]:
        """Optimizer leaves as this group keeps them: those of its buckets, and those that belong to none."""
        mine = {bucket for bucket, o in self.context.owned.items() if self.group in o.owners}
        chosen = {*self.context.optimizer_leaves(mine)}
        keys = (
            Key("optimizer", self.group, k)
            for k, o in enumerate(self.exchanges.program.leaf_owner)
            if o is None or k in chosen
        )
        return tuple(key.shard if self.context.shards_of(key) > 1 else key for key in keys)

    @property
    def accumulator_keys(self) -> tuple[Key, ...]:
        """Gradient accumulators, zero between steps."""
        return tuple(self.context.accumulated(self.group, i) for i in self.leaves)

    def _sharded(self, key: Key) -> Ownership | None:
        """The bucket of a key whose update works on shards; None for others."""
        owned = self.context.owned_key(key)
        return owned if owned is not None and owned.num_shards > 1 and owned.elementwise else None

    def _given(self) -> dict[int, Key]:
        """Inputs of the optimizer program that this group has -> their keys, sharded where the update is."""
        program, given = self.exchanges.program, {}
        for leaf in self.leaves:
            k, gradient = self.context.trainable_index[leaf], Key("gradient", self.group, leaf)
            sharded = self._sharded(gradient) is not None
            given[program.gradient_input(k)] = self._gradient(leaf) if sharded else gradient
            given[program.param_input(k)] = (
                self.context.held(self.group, leaf) if sharded else Key("state", self.group, leaf)
            )
        for key in self.optimizer_keys:
            plain = Key("optimizer", self.group, key.item)
            given[program.leaf_input(key.item)] = key if self._sharded(key) is not None else plain
        return given

    # -- programs --------------------------------------------------------------------------------------
    def reduction(self) -> LocalProgram:
        """Accumulators -> gradients, for ``gradients`` and where no update follows."""
        found = self.context.owned_leaf
        own = [i for i in self.leaves if len(found[i].owners) == 1 or found[i].bucket not in self.context.reduced]
        writes = tuple(Key("gradient", self.group, i) for i in own)
        reductions = [c for c in self.before if c.does != "gather"]
        gathers = whole_gradients(self.context, self.group, own)
        made = {*self._casts().values(), *(key for c in reductions for key in c.writes)}
        reads = (*self._casts(), *(k for c in (*reductions, *gathers) for k in c.reads if k not in made))

        def body(env: dict[Key, Any]) -> dict[Key, Any]:
            env = dict(env)
            self._reduce(env, [*reductions, *gathers])
            return {key: env[key] for key in writes}

        reads = (*reads, *(key for key in writes if key not in made and self._gradient(key.item) == key))
        return LocalProgram(label=f"reduce {self.group}", reads=tuple(dict.fromkeys(reads)), writes=writes, body=body)

    def round(self, k: int) -> LocalProgram:
        """The program of round ``k``.

        Round 0 reduces the accumulators. The last round writes parameters and optimizer state, and zeroed accumulators
        into the buffers of the gradients.
        """
        program, last = self.exchanges.program, k == self.exchanges.rounds
        wanted = self._final_atoms(program) if last else {v: v for v in self.exchanges.sent(self.group, k)}
        given = self._given()
        known = [*given, *(v for r in range(k) for v in program.exchanged[r])]
        eqns = [program.flat.eqns[i] for i in program.flat.needed(wanted.values(), known)]
        used = {a for e in eqns for a in e.reads()} | {a for a in wanted.values() if isinstance(a, int)}
        made = self._made() if k == 0 else ()
        reads = dict.fromkeys([] if k else self._first_reads())
        reads.update(dict.fromkeys(key for value, key in given.items() if value in used and key not in made))
        if last and k:
            gradients = (key for key in given.values() if key.kind in ("gradient", "gradient_shard"))
            reads.update(dict.fromkeys(gradients))
        clock = (Key("step", self.group),) if last else ()
        later = set(given.values())
        kept = () if last else (*(key for key in made if key in later), Key("exchange", self.group, k))
        writes = tuple(self._kept_form(key) for key in wanted) if last else ()
        zeroed = self.accumulator_keys if last else ()

        def body(env: dict[Key, Any]) -> dict[Key, Any]:
            env = dict(env)
            if k == 0:
                self._reduce(env, self.before)
            found = self._evaluation(program, given, env, k)
            found.run(eqns)
            if not last:
                env[kept[-1]] = self.exchanges.packed(k, [found.sent(v) for v in wanted.values()])
                return {key: env[key] for key in kept}
            self._write(env, wanted, found)
            specs = {key: local_spec(self.context, key) for key in zeroed}
            env.update({key: jnp.zeros(spec.shape, spec.dtype) for key, spec in specs.items()})
            env.update({key: env[key] + 1 for key in clock})
            return {key: env[key] for key in (*writes, *zeroed, *clock)}

        return LocalProgram(
            label=f"update {self.group}" + (f" round {k}" if k else ""),
            reads=(*reads, *(Key("gathered", self.group, r) for r in range(k)), *clock),
            writes=(*writes, *kept, *zeroed, *clock),
            body=body,
        )

    # -- parts of a round --------------------------------------------------------------------------------
    def _gradient(self, leaf: int) -> Key:
        """The gradient of a leaf as a reduction leaves it; without one it is whole, and zero if there are copies."""
        key, owned = Key("gradient", self.group, leaf), self.context.owned_leaf[leaf]
        return key.shard if owned.num_shards > 1 and owned.bucket in self.context.reduced else key

    def _casts(self) -> dict[Key, Key]:
        """Accumulators that need no reduction here -> gradients."""
        reduced = {key for c in self.before for key in c.writes if c.does != "gather"}
        pairs = [(key, self._gradient(i)) for i, key in zip(self.leaves, self.accumulator_keys, strict=True)]
        return {key: found for key, found in pairs if found not in reduced and found.item not in self.elsewhere}

    def _made(self) -> tuple[Key, ...]:
        """What round 0 makes of accumulators and shards."""
        return tuple(dict.fromkeys([*self._casts().values(), *(key for c in self.before for key in c.writes)]))

    def _first_reads(self) -> Iterator[Key]:
        made = self._made()
        yield from self._casts()
        yield from (key for c in self.before for key in c.reads if key not in made)

    def _reduce(self, env: dict[Key, Any], collectives: Sequence[StateCollective]) -> None:
        for key, gradient in self._casts().items():
            spec = local_spec(self.context, gradient)
            alike = env[key].shape == spec.shape
            env[gradient] = env[key].astype(spec.dtype) if alike else jnp.zeros(spec.shape, spec.dtype)
        for found in collectives:
            found.run(env)

    def _evaluation(
        self, program: OptimizerProgram, given: dict[int, Key], env: dict[Key, Any], k: int
    ) -> ShardEvaluation:
        divided = {b: o for b, o in self.context.owned.items() if o.is_divided and self.group in o.owners}
        names, elementwise = self.context.source.bucket_names, program.elementwise

        def shard_of(value: int) -> Shard | None:
            owner = program.owner[value]
            if value not in elementwise.shards or owner is None or names[owner] not in divided:
                return None
            return self._shard(divided[names[owner]], program.flat.avals[value].shape)

        values = dict(program.flat.consts)
        for value, key in given.items():
            if key in env:
                shard = shard_of(value)
                whole = shard is not None and not key.kind.endswith("_shard")
                values[value] = shard.of_part(env[key]) if whole else env[key]
        received = self.exchanges.received([env[Key("gathered", self.group, r)] for r in range(k)])
        return ShardEvaluation(
            avals=program.flat.avals, shard_of=shard_of, combine=elementwise.combine, values=values, received=received
        )

    def _shard(self, owned: Ownership, shape: Sequence[int]) -> Shard:
        """What this device holds of an array; a single number of experts is on all of their devices."""
        parts = owned.num_parts if shape else 1
        part = jax.lax.axis_index(EXPERT_AXIS) if parts > 1 else 0
        if owned.num_shards == 1:
            return Shard(1, 0, parts, part)
        axes = tuple(axis for axis in owned.axes if axis != OWNER)
        first = owned.owners.index(self.group) * (owned.num_shards // len(owned.owners))
        if not axes and owned.num_shards > len(owned.owners):  # owners of different size lie side by side
            axes, first = REPLICA_AXES, self.context.replicas_before(owned, self.group)
        index = (jax.lax.axis_index(axes) if axes else 0) + first
        return Shard(owned.num_shards, index, parts, part)

    def _final_atoms(self, program: OptimizerProgram) -> dict[Key, Any]:
        atoms = {
            self.context.held(self.group, i): program.param_output(self.context.trainable_index[i]) for i in self.leaves
        }
        return {**atoms, **{key: program.leaf_output(key.item) for key in self.optimizer_keys}}

    def _kept_form(self, key: Key) -> Key:
        """Where the last round leaves what it wrote: parameters that other groups gather too, as shards."""
        owned = self.context.owned_key(key)
        joint = owned is not None and len(owned.owners) > 1 and self._sharded(key) is not None
        return key.shard if joint and key.kind == "state" else key

    def _write(self, env: dict[Key, Any], wanted: dict[Key, Any], found: ShardEvaluation) -> None:
        """New parameters and optimizer leaves, in the form in which they are kept."""
        for key, atom in wanted.items():
            owned = self.context.owned_key(key)
            if owned is not None and (owned.is_divided or key.kind.endswith("_shard")):
                target = key if owned.num_shards == 1 or key.kind.endswith("_shard") else key.shard
                value = found.part(atom, self._shard(owned, self.context.logical_spec(key).shape)).astype(
                    self.context.whole_spec(key).dtype
                )
                env[target] = value.reshape(local_spec(self.context, target).shape)
            else:
                env[key] = jnp.asarray(found.whole(atom))
        for collective in self.after:
            collective.run(env)


def whole_gradients(context: Context, group: str, leaves: Iterable[int]) -> list[StateCollective]:
    """Gathers of the gradients among those of ``leaves`` that a plan keeps in shards, to be looked at."""
    buckets: dict[str, list[Key]] = {}
    for leaf in leaves:
        owned = context.owned_leaf[leaf]
        if owned.num_shards > 1 and owned.bucket in context.reduced:
            buckets.setdefault(owned.bucket, []).append(Key("gradient", group, leaf))
    return [
        StateCollective(
            context=context, group=group, id=NodeId(f"all_gather gradient {bucket}", "B"), does="gather", when="after",
            owned=context.owned[bucket], reads=tuple(k.shard for k in writes), writes=tuple(writes),
        )
        for bucket, writes in buckets.items()
    ]  # fmt: skip


def group_updates(context: Context, collectives: Iterable[StateCollective]) -> dict[str, GroupUpdate]:
    """The update of every group that holds trainable leaves."""
    known, state = list(collectives), context.source.state
    trainable = {
        g: tuple(i for i in leaves if state.leaves[i].kind == "trainable") for g, leaves in context.group_leaves.items()
    }
    participants = tuple(g for g, leaves in trainable.items() if leaves)
    rounds = max((n.round for n in context.dag.nodes.values() if isinstance(n, Update)), default=0)
    exchanges = Exchanges(context=context, participants=participants, rounds=rounds)
    reduced = {
        (owner, key.item)
        for c in known
        if c.does in ("reduce", "scatter") and (c.when == "slot" or c.group not in context.meshes)
        for owner in c.owned.owners
        for key in c.writes
    }
    return {
        g: GroupUpdate(
            context=context, group=g, leaves=trainable[g], exchanges=exchanges,
            before=tuple(c for c in known if c.group == g and c.when == "before"),
            after=tuple(c for c in known if c.group == g and c.when == "after"),
            elsewhere=frozenset(leaf for owner, leaf in reduced if owner == g),
        )
        for g in participants
    }  # fmt: skip
