"""A chunk: the equations of one or more units, with everything that enters and leaves them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from piper_jax.tracing.loss_program import LossProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What a compute node computes. All tuples are ascending.

    Attributes:
      eqns: indices of the equations, including the roaming ones that are recomputed here.
      state, batch: leaves read.  uses_key: reads the slice's random key.
      externals: values produced by other chunks.  exports: values that other chunks need.
      terms, metrics, carried: indices of the loss terms, metrics and changes of state computed here.
      diff_state, diff_externals, diff_exports: those of the above that gradients flow through.
    """

    eqns: tuple[int, ...]
    state: tuple[int, ...]
    batch: tuple[int, ...]
    uses_key: bool
    externals: tuple[int, ...]
    exports: tuple[int, ...]
    terms: tuple[int, ...]
    metrics: tuple[int, ...]
    carried: tuple[int, ...]
    diff_state: tuple[int, ...]
    diff_externals: tuple[int, ...]
    diff_exports: tuple[int, ...]
    diff_terms: tuple[int, ...]

    @property
    def has_backward(self) -> bool:
        return bool(self.diff_exports or self.diff_terms) and bool(self.diff_state or self.diff_externals)

    def inputs(self, program: LossProgram) -> list[int]:
        """The values that it is given: of state, batch, key and other chunks, in this order."""
        return [
            *(program.state_input(i) for i in self.state),
            *(program.batch_input(i) for i in self.batch),
            *([program.key_input] if self.uses_key else []),
            *self.externals,
        ]


def chunks(program: LossProgram, units: Sequence[int | None], groups: Sequence[Iterable[int]]) -> list[Chunk]:
    """The chunks made of ``groups`` of units (every unit in exactly one group).

    Args:
      program: the loss at any batch size.
      units: the unit of each equation, None where it roams.
      groups: unit indices of each chunk.
    """
    chunk_of_unit = {u: k for k, group in enumerate(groups) for u in group}
    owner = [chunk_of_unit[u] if u is not None else None for u in units]
    return _Builder(program, owner, len(groups)).build()


class _Builder:
    def __init__(self, program: LossProgram, owner: Sequence[int | None], num: int):
        self.program, self.flat, self.num = program, program.flat, num
        self.owner = owner
        self.home = {o: owner[i] for i, e in enumerate(self.flat.eqns) for o in e.outputs if owner[i] is not None}
        self.roots: list[set[int]] = [set() for _ in range(num)]
        self.terms: list[list[int]] = [[] for _ in range(num)]
        self.metrics: list[list[int]] = [[] for _ in range(num)]
        self.carried: list[list[int]] = [[] for _ in range(num)]

    def build(self) -> list[Chunk]:
        own = [[i for i, o in enumerate(self.owner) if o == k] for k in range(self.num)]
        self._place_outputs(own)
        eqns, externals = zip(*(self._with_equal(k, own[k]) for k in range(self.num)), strict=True)
        wanted = self._wanted(eqns)
        exported = {v for found in externals for v in found}
        return [self._chunk(k, eqns[k], externals[k], exported, wanted) for k in range(self.num)]

    def _place_outputs(self, own: Sequence[Sequence[int]]) -> None:
        """Terms, metrics and state go where they are produced; those of parameters alone where these are read first."""
        readers: dict[int, int] = {}
        for k in range(self.num):
            for atom in self._state_reads(own[k]):
                readers.setdefault(atom, k)
        for index, (_, atom) in enumerate(self.program.terms):
            self.terms[self._home(atom, readers)].append(index)
        for index, metric in enumerate(self.program.metrics):
            self.metrics[self._home(metric.atom, readers)].append(index)
        for index, change in enumerate(self.program.carried):
            beside = readers.get(self.program.state_input(change.leaf))
            placed = isinstance(change.atom, int) and change.atom in self.home
            self.carried[self._home(change.atom, readers) if placed or beside is None else beside].append(index)
        for k in range(self.num):
            outputs = [self.program.terms[i][1] for i in self.terms[k]]
            outputs += [self.program.metrics[i].atom for i in self.metrics[k]]
            outputs += [self.program.carried[i].atom for i in self.carried[k]]
            self.roots[k] = {a for a in outputs if isinstance(a, int)}

    def _state_reads(self, eqns: Sequence[int]) -> set[int]:
        state = set(self.flat.inputs[: self.program.num_state])
        values = [a for i in eqns for a in self.flat.eqns[i].reads()]
        reads = state & set(values)
        for i in self.flat.needed(values, self.home):
            reads |= state & set(self.flat.eqns[i].reads()) if self.owner[i] is None else set()
        return reads

    def _home(self, atom: int | object, readers: dict[int, int]) -> int:
        if not isinstance(atom, int):
            return self.num - 1
        if atom in self.home:
            return self.home[atom]
        state = set(self.flat.inputs[: self.program.num_state])
        reads = state & {a for i in self.flat.needed([atom]) for a in self.flat.eqns[i].reads()} | (state & {atom})
        return min((readers[a] for a in reads if a in readers), default=self.num - 1)

    def _with_equal(self, k: int, own: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The closure, with the next value of all state that is read here and that no batch changes."""
        while True:
            eqns, externals = self._closure(k, own)
            reads = {a for i in eqns for a in self.flat.eqns[i].reads()} | self.roots[k]
            more = [
                i for i, change in enumerate(self.program.carried)
                if change.carry == "equal" and i not in self.carried[k]
                and self.program.state_input(change.leaf) in reads
            ]  # fmt: skip
            if not more:
                return eqns, externals
            self.carried[k] += more
            self.roots[k] |= {a for i in more if isinstance(a := self.program.carried[i].atom, int)}

    def _closure(self, k: int, own: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Own equations plus the roaming ones they need, and the values that come from other chunks."""
        members, externals = set(own), set()
        wanted = set(self.roots[k])
        for i in own:
            wanted.update(self.flat.eqns[i].reads())
        for i in range(len(self.flat.eqns) - 1, -1, -1):
            eqn = self.flat.eqns[i]
            if self.owner[i] is None and any(o in wanted for o in eqn.outputs):
                members.add(i)
                wanted.update(eqn.reads())
        for value in wanted:
            if value in self.home and self.home[value] != k:
                externals.add(value)
        return tuple(sorted(members)), tuple(sorted(externals))

    def _wanted(self, eqns: Sequence[Sequence[int]]) -> list[set[int]]:
        """For each value the chunks whose own equations lead from it, differentiably, to a term of the loss.

        They may lead there through values that other chunks want of them. A chunk that only reads a value under
        ``stop_gradient``, or compares it, is none of them, though others may be.

        Args:
          eqns: of each chunk.
        """
        wanted: list[set[int]] = [set() for _ in self.flat.avals]
        members: list[list[int]] = [[] for _ in self.flat.eqns]
        for k in range(self.num):
            for index in eqns[k]:
                members[index].append(k)
            for atom in (self.program.terms[t][1] for t in self.terms[k]):
                if isinstance(atom, int):
                    wanted[atom].add(k)
        for eqn, chunks_of in zip(reversed(self.flat.eqns), reversed(members), strict=True):
            if eqn.name == "stop_gradient":
                continue
            leading = {k for k in chunks_of for o in eqn.outputs if k in wanted[o] or (wanted[o] and o in self.home)}
            for a in eqn.reads() if leading else ():
                if jnp.issubdtype(self.flat.avals[a].dtype, jnp.inexact):
                    wanted[a] |= leading
        return wanted

    def _chunk(
        self, k: int, eqns: tuple[int, ...], externals: tuple[int, ...], exported: set[int], wanted: Sequence[set[int]]
    ) -> Chunk:
        program, active = self.program, self.program.active
        reads = {a for i in eqns for a in self.flat.eqns[i].reads()} | self.roots[k]
        state = tuple(i for i in range(program.num_state) if program.state_input(i) in reads)
        exports = tuple(sorted(v for v in exported if self.home[v] == k))
        return Chunk(
            eqns=eqns,
            state=state,
            batch=tuple(i for i in range(program.num_batch) if program.batch_input(i) in reads),
            uses_key=program.key_input in reads,
            externals=externals,
            exports=exports,
            terms=tuple(self.terms[k]),
            metrics=tuple(self.metrics[k]),
            carried=tuple(sorted(self.carried[k])),
            diff_state=tuple(i for i in state if active[v := program.state_input(i)] and k in wanted[v]),
            diff_externals=tuple(v for v in externals if active[v] and k in wanted[v]),
            diff_exports=tuple(v for v in exports if active[v] and wanted[v] - {k}),
            diff_terms=tuple(
                i for i in self.terms[k] if isinstance(a := program.terms[i][1], int) and active[a]
            ),
        )  # fmt: skip
