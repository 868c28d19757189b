"""The traced program whole, on one device, one microbatch at a time: what the nodes of a plan should give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from piper_jax.lowering.context import Context
from piper_jax.lowering.keys import Key
from piper_jax.lowering.shards import from_rows
from piper_jax.runtime.replicas import REPLICA_AXIS, over_replicas
from piper_jax.tracing.constraints import under_a_mesh
from piper_jax.tracing.flat import FlatEqn, read
from piper_jax.tracing.replica import Replica

_REPLICA = Replica((REPLICA_AXIS,), final=False)


def at_64_bits(value: Any) -> np.ndarray:
    """An array as float64, or as complex128 where it is complex."""
    array = np.asarray(value)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def relative_difference(found: Any, expected: Any) -> float:
    """The largest absolute difference over the largest finite value expected; infinite if one alone is not finite."""
    a, b = at_64_bits(found), at_64_bits(expected)
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return np.inf
    a, b = a[finite], b[finite]
    return float(np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(b), initial=0.0), 1e-30))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What one microbatch gives. All but the gradients, which are sums over its replicas, are ``[replicas, ...]``.

    Attributes:
      values, cotangents: of what chunks export, by value of the flat program.
      gradients: by trainable leaf.  terms: of the loss.  metrics: auxiliary outputs.
      carried: by leaf, what each replica leaves for the next microbatch or the next step.
    """

    values: Mapping[int, Any]
    cotangents: Mapping[int, Any]
    gradients: Mapping[int, Any]
    terms: Sequence[Any]
    metrics: Sequence[Any]
    carried: Mapping[int, Any]


@dataclass(frozen=True, kw_only=True)
class WholeProgram:
    """The reference of bisection and of single nodes. It starts from the state and batch among ``registers``.

    It knows no chunks: cotangents of values between stages are its derivatives by a zero added to them.
    """

    context: Context
    registers: Mapping[Key, Any]

    def run(self, m: int) -> Expected:
        """Everything that microbatch ``m`` gives, after those before it."""
        if m not in self._found:
            self._found[m] = self._run(m)
        return self._found[m]

    @cached_property
    def _found(self) -> dict[int, Expected]:
        return {}

    def _run(self, m: int) -> Expected:
        context, program = self.context, self.context.program
        flat = program.flat
        exports = sorted({v for c in context.chunk_of.values() for v in c.exports})
        smooth = sorted({v for c in context.chunk_of.values() for v in c.diff_exports})
        eqns = self._eqns_on_nudged(smooth)

        def one(
            trained: Sequence[Any], nudges: Sequence[Any], _: Any, row: tuple[Any, Any], key: Any
        ) -> tuple[Any, Any]:
            env = self._environment(trained, row, key)
            nudge = dict(zip(smooth, nudges, strict=True))
            for eqn in eqns:
                _REPLICA.run([eqn], env)
                env.update({-1 - o: env[o] + nudge[o] for o in eqn.outputs if o in nudge})
            terms = [jnp.asarray(read(a, env)) for _, a in program.terms]
            metrics = [jnp.asarray(read(metric.atom, env)) for metric in program.metrics]
            carried = {c.leaf: jnp.asarray(read(c.atom, env)) for c in program.carried}
            results = [env[v] for v in exports], terms, metrics, carried
            return self._objective(range(len(program.terms)), env), results

        zeros = [jnp.zeros((context.replicas, *flat.avals[v].shape), flat.avals[v].dtype) for v in smooth]
        (_, (values, terms, metrics, carried)), (gradients, cotangents) = self._differentiated(one, m, zeros, ())
        return Expected(
            values=dict(zip(exports, values, strict=True)),
            cotangents=dict(zip(smooth, cotangents, strict=True)),
            gradients=dict(zip(context.source.state.trainable, gradients, strict=True)),
            terms=terms,
            metrics=metrics,
            carried=carried,
        )

    def share(self, op: str, m: int, expected: Expected) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
        """What one operation alone adds to the cotangents of its inputs and to the gradients of its leaves.

        Needed where several operations read the same value or the same leaf: ``run`` gives the sums.
        """
        context, chunk = self.context, self.context.chunk_of[op]
        flat = context.program.flat
        smooth = [expected.values[v] for v in chunk.diff_externals]
        others = [expected.values[v] for v in chunk.externals]
        seeds = [expected.cotangents[v] for v in chunk.diff_exports]

        def one(trained: Any, smooth: Any, fixed: Any, row: Any, key: Any) -> tuple[Any, None]:
            others, seeds = fixed
            env = self._environment(trained, row, key)
            env |= dict(zip(chunk.externals, others, strict=True)) | dict(
                zip(chunk.diff_externals, smooth, strict=True)
            )
            _REPLICA.run((flat.eqns[i] for i in chunk.eqns), env)
            passed = sum((env[v] * g).sum() for v, g in zip(chunk.diff_exports, seeds, strict=True))
            return self._objective(chunk.diff_terms, env) + passed, None

        _, (gradients, cotangents) = self._differentiated(one, m, smooth, (others, seeds))
        by_leaf = dict(zip(context.source.state.trainable, gradients, strict=True))
        return dict(zip(chunk.diff_externals, cotangents, strict=True)), {k: by_leaf[k] for k in chunk.diff_state}

    def _differentiated(self, one: Callable[..., Any], m: int, smooth: Sequence[Any], fixed: Any) -> Any:
        """``((sum of objectives, aux), gradients)`` of ``one`` over all replicas, by parameters and ``smooth``."""
        rows, keys = self._rows(m), self._keys(m)

        def whole(trained: Sequence[Any], smooth: Sequence[Any]) -> tuple[Any, Any]:
            objectives, aux = over_replicas(one, trained, smooth, fixed, rows, keys)
            return objectives.sum(), aux

        trained = [self._state(leaf) for leaf in self.context.source.state.trainable]
        names = self.context.program.axis_names
        return under_a_mesh(lambda: jax.jit(jax.value_and_grad(whole, (0, 1), has_aux=True))(trained, smooth), names)

    def _environment(self, trained: Sequence[Any], rows: tuple[Any, Any], key: Any) -> dict[int, Any]:
        program, (row, turn) = self.context.program, rows
        state = [turn[i] if i in turn else self._state(i) for i in range(program.num_state)]
        for i, value in zip(self.context.source.state.trainable, trained, strict=True):
            state[i] = value
        return {**program.flat.consts, **dict(zip(program.flat.inputs, [*state, *row, key], strict=True))}

    def _objective(self, terms: Iterable[int], env: Mapping[int, Any]) -> Any:
        """What is differentiated: the terms by their share of the loss."""
        mean = 1.0 / self.context.num_slices
        seeds = {"loss": mean, "extra": mean, "total": self._seed()}
        found = [(seeds[k], jnp.asarray(read(a, env), jnp.result_type(float))) for k, a in map(self._term, terms)]
        return sum((seed * value for seed, value in found), jnp.zeros(()))

    def _term(self, index: int) -> tuple[str, Any]:
        return self.context.program.terms[index]

    def _eqns_on_nudged(self, smooth: Sequence[int]) -> list[FlatEqn]:
        """The program's equations; value ``v`` of another chunk is read as ``-1 - v``, to which a zero is added."""
        chunk_of_unit = {u: name for name, op in self.context.dag.ops.items() for u in op.units}
        home = {v: name for name, chunk in self.context.chunk_of.items() for v in chunk.exports}
        eqns = []
        for eqn, unit in zip(self.context.program.flat.eqns, self.context.source.units.of_eqn, strict=True):
            here = chunk_of_unit.get(unit) if unit is not None else None
            inputs = tuple(
                -1 - a if isinstance(a, int) and a in smooth and here is not None and home[a] != here else a
                for a in eqn.inputs
            )
            eqns.append(replace(eqn, inputs=inputs))
        return eqns

    def _local(self, array: Any) -> Any:
        return jax.device_put(array, jax.devices()[0]) if isinstance(array, jax.Array) else array

    def _state(self, leaf: int) -> Any:
        """A leaf whole: the first copy of it, or the shards of all its owners."""
        held = [k for k in self.registers if k.kind in ("state", "state_shard") and k.item == leaf]
        whole = next((k for k in held if k.kind == "state"), None)
        if whole is not None:
            return self._local(self.registers[whole])
        rows = jnp.concatenate([self._local(self.registers[k]) for k in held])
        return from_rows(rows, self.context.logical_spec(held[0]).shape, self.context.parts_of(held[0]))

    def _seed(self) -> Any:
        return next((self._local(v) for k, v in self.registers.items() if k.kind == "seed"), 1.0)

    def _rows(self, m: int) -> tuple[list[Any], dict[int, Any]]:
        """``[replicas, ...]`` of the batch, and of the state that the microbatch before left."""
        left = self.run(m - 1).carried if m and self.context.program.in_turn else {}
        rows = []
        for leaf, known in enumerate(self.context.source.batch.specs):
            array = next(
                (self.registers[k] for k in self.registers if k.kind in ("batch", "shared") and k.item == leaf), None
            )
            if array is None:
                size = self.context.batch_size // self.context.num_slices
                shape = (self.context.replicas, size, *known.shape[1:]) if known.shape else (self.context.replicas,)
                rows.append(jnp.zeros(shape, known.dtype))
            else:
                local = self._local(array)
                rows.append(local[m] if known.shape else jnp.broadcast_to(local, (self.context.replicas,)))
        return rows, {leaf: left[leaf] for leaf in self.context.program.in_turn if leaf in left}

    def _keys(self, m: int) -> Any:
        registers = {k.kind: self._local(v) for k, v in self.registers.items() if k.kind in ("key", "step")}
        step_key = jax.random.fold_in(registers["key"], registers["step"])
        slices = m * self.context.replicas + jnp.arange(self.context.replicas)
        return jax.vmap(lambda s: jax.random.fold_in(step_key, s))(slices)
