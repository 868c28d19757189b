"""Evaluates the equations of a chunk, those of an opened ``jax.checkpoint`` under a checkpoint of their own."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import jax

from piper_jax.tracing.flat import Flat, FlatEqn, Remat


def run_checkpointed(flat: Flat, eqns: Sequence[FlatEqn], env: dict[int, Any], kept: Collection[int]) -> None:
    """Evaluates ``eqns`` in ``env``; what lay in one checkpoint is computed again together, by the same policy.

    Args:
      kept: values that are needed besides those that the equations read from each other.
    """
    for remat, group in itertools.groupby(eqns, lambda e: e.remat):
        members = list(group)
        if remat is None:
            flat.run(members, env)
        else:
            inside = set(map(id, members))
            read = {a for e in eqns if id(e) not in inside for a in e.reads()}
            _run_again(flat, members, remat, env, read.union(kept))


def _run_again(flat: Flat, members: Sequence[FlatEqn], remat: Remat, env: dict[int, Any], wanted: set[int]) -> None:
    made = {o for e in members for o in e.outputs}
    given = sorted({a for e in members for a in e.reads()} - made)
    out = sorted(made & wanted)

    def part(*values: Any) -> list[Any]:
        inner = dict(zip(given, values, strict=True))
        flat.run(members, inner)
        return [inner[o] for o in out]

    again = jax.checkpoint(part, policy=remat.policy, prevent_cse=remat.prevent_cse)
    env.update(zip(out, again(*(env[a] for a in given)), strict=True))
