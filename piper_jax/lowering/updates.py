"""Gradient reduction and optimizer update of one group: one program a round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.lowering.context import Context, reduced_buckets
from piper_jax.lowering.exchange import num_words, pack, unpack
from piper_jax.lowering.group_mesh import REPLICA_AXES
from piper_jax.lowering.keys import Key
from piper_jax.lowering.local_program import LocalProgram
from piper_jax.tracing.flat import read
from piper_jax.tracing.optimizer_program import OptimizerProgram


@dataclass(frozen=True, kw_only=True)
class GroupUpdate:
    """What one group reduces and updates.

    Attributes:
      leaves: trainable state leaves on this group.
      reduced_here: for each reduction that this group does alone, its leaves; ``joint`` leaves arrive reduced.
      rounds: how many exchanges precede the last program.
    """

    context: Context
    group: str
    leaves: tuple[int, ...]
    reduced_here: tuple[tuple[int, ...], ...]
    joint: frozenset[int]
    participants: tuple[str, ...]
    rounds: int

    def reduction(self) -> LocalProgram:
        """Accumulators -> gradients, for ``gradients`` and where no update follows."""
        local = [i for i in self.leaves if i not in self.joint]
        return LocalProgram(
            label=f"reduce {self.group}",
            reads=tuple(Key("accumulator", self.group, i) for i in local),
            writes=tuple(Key("gradient", self.group, i) for i in local),
            body=self._reduce,
        )

    def round(self, k: int) -> LocalProgram:
        """The program of round ``k``.

        Round 0 reduces the accumulators. The last round writes parameters and optimizer state, and zeroed accumulators
        into the buffers of the gradients.
        """
        program = self.context.source.optimizer
        assert program is not None
        last = k == self.rounds
        wanted = self._final_atoms(program) if last else self._sent(program, k)
        given = self._given(program)
        eqns = program.flat.needed(wanted.values(), [*given, *(v for r in range(k) for v in program.exchanged[r])])
        reduced = [Key("gradient", self.group, i) for i in self.leaves if i not in self.joint] if k == 0 else []
        zeroed = [Key("accumulator", self.group, i) for i in self.leaves] if last else []
        reads = dict.fromkeys(Key("accumulator", self.group, key.item) for key in reduced)
        reads.update(dict.fromkeys(key for key in self._used(program, eqns, wanted.values()) if key not in reduced))
        reads.update(dict.fromkeys(Key("gradient", self.group, key.item) for key in zeroed))
        reads = {key: None for key in reads if key not in reduced}
        clock = [Key("step", self.group)] if last else []
        sent = [] if last else [*reduced, Key("exchange", self.group, k)]

        def body(env: dict[Key, Any]) -> dict[Key, Any]:
            env = {**env, **(self._reduce(env) if reduced else {})}
            values = {**program.flat.consts, **{v: env[key] for v, key in given.items() if key in env}}
            values.update(self._received(program, k, env))
            program.flat.run((program.flat.eqns[i] for i in eqns), values)
            out = {key: env[key] for key in reduced}
            for key in zeroed:
                known = self.context.accumulator_spec(key.item)
                out[key] = jnp.zeros(known.shape, known.dtype)
            out.update({key: env[key] + 1 for key in clock})
            if last:
                return {**out, **{key: jnp.asarray(read(atom, values)) for key, atom in wanted.items()}}
            words = pack([values[v] for v in wanted.values()])
            out[Key("exchange", self.group, k)] = jnp.pad(words, (0, self._width(program, k) - words.shape[0]))
            return out

        return LocalProgram(
            label=f"update {self.group}" + (f" round {k}" if k else ""),
            reads=(*reads, *(Key("gathered", self.group, r) for r in range(k)), *clock),
            writes=(*(wanted if last else sent), *zeroed, *clock),
            body=body,
        )

    def _used(self, program: OptimizerProgram, eqns: Sequence[int], wanted: Iterable[Any]) -> list[Key]:
        """What the equations of a round read of this group's gradients and state."""
        used = {a for i in eqns for a in program.flat.eqns[i].reads()} | {a for a in wanted if isinstance(a, int)}
        return [key for value, key in self._given(program).items() if value in used]

    def _given(self, program: OptimizerProgram) -> dict[int, Key]:
        """Values of the optimizer program that this group has -> their keys."""
        given: dict[int, Key] = {}
        for leaf in self.leaves:
            k = self.context.trainable_index[leaf]
            given[program.gradient_input(k)] = Key("gradient", self.group, leaf)
            given[program.param_input(k)] = Key("state", self.group, leaf)
        for k in self.optimizer_leaves:
            given[program.leaf_input(k)] = Key("optimizer", self.group, k)
        return given

    @property
    def optimizer_leaves(self) -> tuple[int, ...]:
        """Optimizer leaves kept on this group: those of its buckets, and those that belong to none."""
        program = self.context.source.optimizer
        assert program is not None
        mine = {b for b, groups in self.context.owners.items() if self.group in groups}
        names = self.context.source.bucket_names
        return tuple(k for k, o in enumerate(program.leaf_owner) if o is None or names[o] in mine)

    def _final_atoms(self, program: OptimizerProgram) -> dict[Key, Any]:
        atoms: dict[Key, Any] = {
            Key("state", self.group, leaf): program.param_output(self.context.trainable_index[leaf])
            for leaf in self.leaves
        }
        atoms.update({Key("optimizer", self.group, k): program.leaf_output(k) for k in self.optimizer_leaves})
        return atoms

    def _sent(self, program: OptimizerProgram, k: int) -> dict[Any, int]:
        return {v: v for v in program.exchanged[k] if self._sender(program, v) == self.group}

    def _sender(self, program: OptimizerProgram, value: int) -> str:
        owner = program.owner[value]
        assert owner is not None
        bucket = self.context.source.bucket_names[owner]
        return next(g for g in self.context.owners[bucket] if g in self.participants)

    def _width(self, program: OptimizerProgram, k: int) -> int:
        return max(
            sum(num_words(program.flat.avals[v]) for v in program.exchanged[k] if self._sender(program, v) == g)
            for g in self.participants
        )

    def _received(self, program: OptimizerProgram, k: int, env: Mapping[Key, Any]) -> dict[int, Any]:
        values: dict[int, Any] = {}
        for r in range(k):
            rows = env[Key("gathered", self.group, r)]
            for position, group in enumerate(self.participants):
                sent = [v for v in program.exchanged[r] if self._sender(program, v) == group]
                row = rows[position * self.context.replicas]
                values.update(zip(sent, unpack(row, [program.flat.avals[v] for v in sent]), strict=True))
        return values

    def exchange_width(self, k: int) -> int:
        """32-bit words that each group contributes to exchange ``k``."""
        program = self.context.source.optimizer
        assert program is not None
        return self._width(program, k)

    def _reduce(self, env: Mapping[Key, Any]) -> dict[Key, Any]:
        """Sums accumulators over the replicas, one collective a bucket and dtype, then casts to parameter dtypes."""
        out: dict[Key, Any] = {}
        together = {leaf for leaves in self.reduced_here for leaf in leaves}
        for leaves in self.reduced_here:
            sums = flat_sum([env[Key("accumulator", self.group, i)] for i in leaves], REPLICA_AXES)
            out.update({Key("gradient", self.group, i): v for i, v in zip(leaves, sums, strict=True)})
        for leaf in self.leaves:
            if leaf not in together and leaf not in self.joint:
                out[Key("gradient", self.group, leaf)] = env[Key("accumulator", self.group, leaf)]
        return {key: v.astype(self.context.leaf_spec(key.item).dtype) for key, v in out.items()}


def flat_sum(arrays: Sequence[Any], axes: tuple[str, ...]) -> list[Any]:
    """Sums over mesh axes, all arrays of one dtype in ONE all-reduce."""
    sums: list[Any] = [None] * len(arrays)
    for dtype in dict.fromkeys(a.dtype for a in arrays):
        chosen = [k for k, a in enumerate(arrays) if a.dtype == dtype]
        total = jax.lax.psum(jnp.concatenate([arrays[k].reshape(-1) for k in chosen]), axes)
        start = 0
        for k in chosen:
            sums[k] = total[start : start + arrays[k].size].reshape(arrays[k].shape)
            start += arrays[k].size
    return sums


def group_updates(context: Context) -> dict[str, GroupUpdate]:
    """The update of every group that holds trainable leaves or a clock of its own."""
    state, program = context.source.state, context.source.optimizer
    trainable = {
        g: tuple(i for i in leaves if state.leaves[i].kind == "trainable") for g, leaves in context.group_leaves.items()
    }
    participants = tuple(g for g, leaves in trainable.items() if leaves)
    rounds = len(program.exchanged) if program is not None and len(participants) > 1 else 0
    return {g: _group_update(context, g, trainable[g], participants, rounds) for g in participants}


def _group_update(
    context: Context, group: str, leaves: tuple[int, ...], participants: tuple[str, ...], rounds: int
) -> GroupUpdate:
    here, joint = [], set()
    for node in context.reductions:
        leaves_of = [leaf for bucket in reduced_buckets(node) for leaf in context.source.bucket_leaves[bucket]]
        if node.group == group:
            here.append(tuple(leaves_of))
        elif group in context.owners[reduced_buckets(node)[0]]:
            joint.update(leaves_of)
    return GroupUpdate(
        context=context,
        group=group,
        leaves=leaves,
        reduced_here=tuple(here),
        joint=frozenset(joint),
        participants=participants,
        rounds=rounds,
    )
