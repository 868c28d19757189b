"""Gradient reduction and optimizer update of one group: one program a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.lowering.context import Context
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
        """Accumulators -> gradients (for ``gradients`` and where no update follows); accumulators become zero."""
        accumulators = [Key("accumulator", self.group, i) for i in self.leaves if i not in self.joint]
        gradients = [Key("gradient", self.group, i) for i in self.leaves if i not in self.joint]

        def body(env: dict[Key, Any]) -> dict[Key, Any]:
            return {**self._reduce(env), **{k: jnp.zeros_like(env[k]) for k in accumulators}}

        return LocalProgram(
            label=f"reduce {self.group}", reads=tuple(accumulators), writes=(*gradients, *accumulators), body=body
        )

    def round(self, k: int) -> LocalProgram:
        """The program of round ``k``; the last one writes parameters and optimizer state."""
        program = self.context.source.optimizer
        assert program is not None
        last = k == self.rounds
        wanted = self._final_atoms(program) if last else self._sent(program, k)
        given = self._given(program)
        exchanged = [v for r in range(k) for v in program.exchanged[r]]
        eqns = program.flat.needed(wanted.values(), [*given, *exchanged])
        used = {a for i in eqns for a in program.flat.eqns[i].reads()} | {
            a for a in wanted.values() if isinstance(a, int)
        }
        produced = {o for i in eqns for o in program.flat.eqns[i].outputs}
        own = [key for value, key in given.items() if value in used and value not in produced]
        reads, fresh = self._round_reads(own, first=k == 0, last=last)
        writes = [*wanted] if last else [*fresh, Key("exchange", self.group, k)]
        accumulators = [key for key in reads if key.kind == "accumulator"]
        gathered = [Key("gathered", self.group, r) for r in range(k)]
        clock = [Key("step", self.group)] if last else []

        def body(env: dict[Key, Any]) -> dict[Key, Any]:
            env = {**env, **(self._reduce(env) if accumulators else {})}
            values = {**program.flat.consts, **{v: env[key] for v, key in given.items() if key in env}}
            values.update(self._received(program, k, env))
            program.flat.run((program.flat.eqns[i] for i in eqns), values)
            out: dict[Key, Any] = {key: jnp.zeros_like(env[key]) for key in accumulators}
            out.update({key: env[key] for key in fresh})
            out.update({key: env[key] + 1 for key in clock})
            if last:
                out.update({key: jnp.asarray(read(atom, values)) for key, atom in wanted.items()})
            else:
                words = pack([values[v] for v in wanted.values()])
                width = self._width(program, k)
                out[Key("exchange", self.group, k)] = jnp.pad(words, (0, width - words.shape[0]))
            return out

        return LocalProgram(
            label=f"update {self.group}" + (f" round {k}" if k else ""),
            reads=(*reads, *gathered, *clock),
            writes=(*writes, *accumulators, *clock),
            body=body,
        )

    def _round_reads(self, own: Sequence[Key], *, first: bool, last: bool) -> tuple[list[Key], list[Key]]:
        """Inputs of a round, and the gradients it reduces for later rounds."""
        local = [i for i in self.leaves if i not in self.joint]
        kept = [k for k in own if not (first and k.kind == "gradient" and k.item in local)]
        if not first:
            return kept, []
        return kept + [Key("accumulator", self.group, i) for i in local], (
            [] if last else [Key("gradient", self.group, i) for i in local]
        )

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
        bucket = context.source.bucket_leaves[str(node.bucket)]
        if node.group == group:
            here.append(tuple(bucket))
        elif group in context.owners[str(node.bucket)]:
            joint.update(bucket)
    return GroupUpdate(
        context=context,
        group=group,
        leaves=leaves,
        reduced_here=tuple(here),
        joint=frozenset(joint),
        participants=participants,
        rounds=rounds,
    )
