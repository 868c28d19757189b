"""A program of two passes ties each exchange of one to products of the other, by data: read from what is traced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.extend.core import Var
from oracle import strategy
from test_mixtures import SOFTMAX, problem

import piper_jax as piper
from piper_jax.lowering.programs import Compiled, Compiler
from piper_jax.lowering.tables import Tables
from piper_jax.targets import ahead

TRACED: dict[str, Any] = {}


def _traced(self: Compiler, body: Any, *, label: str, mesh: Any, specs: Any, in_specs: Any, out_specs: Any, **_: Any):
    mapped = jax.shard_map(
        lambda *args: tuple(body(*args)), mesh=mesh, in_specs=tuple(in_specs), out_specs=tuple(out_specs),
        check_vma=False,
    )  # fmt: skip
    TRACED[label] = jax.make_jaxpr(mapped)(*specs).jaxpr.eqns[-1].params["jaxpr"]
    return Compiled(label=label, digest=label, resolve=lambda: pytest.fail("nothing is compiled here"))


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[str, Any]]:
    """The programs with a forward and a backward, as for devices that have streams."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tables, "has_streams", True)
        patched.setattr(Compiler, "compile", _traced)
        patched.setattr(ahead, "_distinct", lambda _: [])
        found = problem(SOFTMAX | {"num_layers": 5})  # stages of one layer and of two
        plan = piper.trace(found.loss_fn, found.params, found.batch, optimizer=found.optimizer)
        chosen = strategy(stages=2, expert_parallel=2, microbatches=4, schedule="DualPipeV")
        ahead.compile_ahead(plan.apply(chosen), "cpu:4")
        yield {label: jaxpr for label, jaxpr in TRACED.items() if {"F", "B"} <= {w[0] for w in label.split()}}


def _dependencies(eqns: list[Any]) -> list[int]:
    """For each equation a bit for each that it needs, itself included. A barrier ties nothing: XLA takes it away."""
    made: dict[Any, int] = {}
    needs: list[int] = []
    for k, eqn in enumerate(eqns):
        read = [made.get(v, 0) if isinstance(v, Var) else 0 for v in eqn.invars]
        if eqn.primitive.name == "optimization_barrier":
            made.update(zip(eqn.outvars, read, strict=True))
            needs.append(0)
            continue
        needs.append(1 << k)
        for bits in read:
            needs[k] |= bits
        made.update(dict.fromkeys(eqn.outvars, needs[k]))
    return needs


def test_each_exchange_lies_beside_products_of_the_other_pass(pairs: dict[str, Any]) -> None:
    lengths = set()
    for label, jaxpr in pairs.items():
        eqns = list(jaxpr.eqns)
        needs, words = _dependencies(eqns), [str(e.source_info.name_stack).split("/")[0] for e in eqns]
        products = [k for k, e in enumerate(eqns) if e.primitive.name == "dot_general"]
        exchanges = [k for k, e in enumerate(eqns) if e.primitive.name == "all_to_all"]
        lengths.add(len(exchanges))
        computing = sum(1 << k for k, e in enumerate(eqns) if e.primitive.name not in ("reshape", "concatenate"))
        for exchange in exchanges:
            sent = needs[exchange] & computing & ~(1 << exchange)
            readers = [p for p in products if words[p] == words[exchange] and needs[p] >> exchange & 1]
            beside = [
                p
                for p in products
                if words[p] != words[exchange]
                and needs[p] & sent == sent
                and not needs[p] >> exchange & 1
                and all(needs[reader] >> p & 1 for reader in readers)
            ]
            assert beside, f"{label}: {words[exchange]}, equation {exchange}"
    assert len(lengths) > 1, "stages of different lengths were meant to meet"
