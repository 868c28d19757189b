"""A slot as one program: its compute nodes run in plan order on the local slice of every replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.ir.ids import NodeId
from piper_jax.lowering.context import Context
from piper_jax.lowering.group_mesh import REPLICA_AXES
from piper_jax.lowering.keys import Key
from piper_jax.tracing.flat import Flat, read


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One compute node of a slot, with the arrays it reads and writes.

    ``rows`` are the batch leaves to slice, ``inputs`` the keys of the pass's common inputs (None: not used by it).
    """

    context: Context
    group: str
    id: NodeId
    inputs: tuple[Key | None, ...]
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]

    def run(self, env: dict[Key, Any]) -> None:
        """Evaluates the node on local arrays."""
        (_forward if self.id.PASS == "F" else _backward)(self, env)

    @property
    def mb(self) -> int:
        return self.id.MB or 0


def step(context: Context, group: str, node: NodeId) -> Step:
    """The step of one compute node."""
    built = context.passes(node.op)
    common = _common_keys(context, group, node)
    mb = node.MB or 0
    if node.PASS == "F":
        inputs = tuple(common)
        accumulated = [Key("metric", group, item) for item in _metric_items(context, node.op)]
        writes = [Key("value", group, v, mb) for v in built.chunk.exports] + accumulated
        if context.training:
            writes += [Key("residual", group, (node.op, k), mb) for k in range(built.num_residuals)]
        extra = accumulated
        needs_index = (
            bool(built.chunk.batch)
            or built.chunk.uses_key
            or any(
                isinstance(k.item, int) and context.program.metrics[k.item].kind in ("samples", "last")
                for k in accumulated
            )
        )
    else:
        inputs = tuple(k if used else None for k, used in zip(common, built.backward_uses, strict=True))
        accumulated = [Key("accumulator", group, leaf) for leaf in built.chunk.diff_state]
        extra = [Key("residual", group, (node.op, k), mb) for k in range(built.num_residuals)]
        extra += [k for v in built.chunk.diff_exports for k in _contributions(context, group, v, mb)]
        extra += [Key("seed", group)] if "total" in built.kinds else []
        extra += accumulated
        writes = [Key("cotangent", group, (v, node.op), mb) for v in built.chunk.diff_externals] + accumulated
        needs_index = any(k is not None and k.kind in ("batch", "key") for k in inputs)
    reads = [k for k in inputs if k is not None] + extra
    if any(k.kind == "key" for k in reads):
        reads.append(Key("step", group))
    if needs_index:
        reads.append(Key("microbatch", group, None, mb))
    return Step(
        context=context, group=group, id=node, inputs=inputs, reads=tuple(dict.fromkeys(reads)), writes=tuple(writes)
    )


def _common_keys(context: Context, group: str, node: NodeId) -> list[Key]:
    chunk = context.chunk_of[node.op]
    return [
        *(Key("state", group, leaf) for leaf in chunk.state),
        *(batch_key(context, group, leaf) for leaf in chunk.batch),
        *([Key("key", group)] if chunk.uses_key else []),
        *(Key("value", group, v, node.MB or 0) for v in chunk.externals),
    ]


def batch_key(context: Context, group: str, leaf: int) -> Key:
    """The key of a batch leaf: scalars are shared by all slices."""
    return Key("batch" if context.source.batch.specs[leaf].shape else "shared", group, leaf)


def _metric_items(context: Context, op: str) -> list[Any]:
    built = context.passes(op)
    return [*((kind, op) for kind in built.kinds), *built.chunk.metrics]


def _contributions(context: Context, group: str, value: int, mb: int) -> list[Key]:
    return [Key("cotangent", group, (value, giver), mb) for giver in context.cotangent_givers[value]]


def _common_values(s: Step, env: Mapping[Key, Any]) -> list[Any]:
    """Local values of the common inputs, None where the pass does not read one."""
    index = env.get(Key("microbatch", s.group, None, s.mb))
    values = []
    for key in s.inputs:
        if key is None:
            values.append(None)
        elif key.kind == "batch":
            values.append(jax.lax.dynamic_index_in_dim(env[key], index, 0, keepdims=False))
        elif key.kind == "key":
            slice_index = index * s.context.replicas + jax.lax.axis_index(REPLICA_AXES)
            values.append(jax.random.fold_in(jax.random.fold_in(env[key], env[Key("step", s.group)]), slice_index))
        else:
            values.append(env[key])
    return values


def _run(flat: Flat, inputs: Sequence[Any]) -> list[Any]:
    env = {**flat.consts, **dict(zip(flat.inputs, inputs, strict=True))}
    flat.run(flat.eqns, env, REPLICA_AXES)
    return [read(a, env) for a in flat.outputs]


def _forward(s: Step, env: dict[Key, Any]) -> None:
    built = s.context.passes(s.id.op)
    flat = built.forward if s.context.training else built.evaluate
    results = iter(_run(flat, _common_values(s, env)))
    for key in s.writes:
        value = next(results)
        env[key] = _accumulated(s, env, key, value) if key.kind == "metric" else value


def _accumulated(s: Step, env: Mapping[Key, Any], key: Key, value: Any) -> Any:
    before, kind = env[key], None
    if isinstance(key.item, int):
        kind = s.context.program.metrics[key.item].kind
    index = env.get(Key("microbatch", s.group, None, s.mb))
    match kind:
        case "samples":
            return jax.lax.dynamic_update_index_in_dim(before, value, index, 0)
        case "last":
            return jnp.where(index == s.context.num_microbatches - 1, value, before)
        case _:
            return before + jnp.asarray(value).astype(before.dtype)


def _backward(s: Step, env: dict[Key, Any]) -> None:
    built, context = s.context.passes(s.id.op), s.context
    flat = built.backward
    assert flat is not None
    residuals = [env[Key("residual", s.group, (s.id.op, k), s.mb)] for k in range(built.num_residuals)]
    cotangents = [
        sum(env[k] for k in _contributions(context, s.group, v, s.mb)) for v in built.chunk.diff_exports
    ]  # fmt: skip
    common = _common_values(s, env)
    first_seed = len(common) + len(residuals) + len(cotangents)
    seeds = [
        _seed(s, env, kind).astype(flat.avals[var].dtype)
        for kind, var in zip(built.kinds, flat.inputs[first_seed:], strict=True)
    ]
    results = iter(_run(flat, [*common, *residuals, *cotangents, *seeds]))
    for key in s.writes:
        value = next(results)
        env[key] = env[key] + value.astype(env[key].dtype) if key.kind == "accumulator" else value


def _seed(s: Step, env: Mapping[Key, Any], kind: str) -> Any:
    return env[Key("seed", s.group)] if kind == "total" else jnp.asarray(1.0 / s.context.num_slices)


def local_spec(context: Context, key: Key) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array on one replica."""
    match key.kind:
        case "state":
            return context.leaf_spec(key.item)
        case "accumulator":
            return context.accumulator_spec(key.item)
        case "metric":
            return context.metric_spec(key.item)
        case "batch":
            known = context.source.batch.specs[key.item]
            rows = context.batch_size // context.num_slices
            return jax.ShapeDtypeStruct((context.num_microbatches, rows, *known.shape[1:]), known.dtype)
        case "shared":
            return context.source.batch.specs[key.item]
        case "key":
            return context.key_spec()
        case "step" | "microbatch":
            return jax.ShapeDtypeStruct((), jnp.int32)
        case "seed" | "weight":
            return jax.ShapeDtypeStruct((), jnp.float64 if jax.config.jax_enable_x64 else jnp.float32)
        case "value":
            return _spec(context.program.flat.avals[key.item])
        case "cotangent":
            return _spec(context.program.flat.avals[key.item[0]])
        case "residual":
            op, k = key.item
            built = context.passes(op)
            flat = built.forward
            atom = flat.outputs[len(flat.outputs) - built.num_residuals + k]
            return _spec(flat.avals[atom])  # type: ignore[index]
        case "gradient":
            return context.leaf_spec(key.item)
        case "optimizer":
            return context.source.optimizer.leaf_specs[key.item]  # type: ignore[union-attr]
    raise TypeError(f"{key.kind} has no fixed shape")


def _spec(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
