"""A slot as one program: its compute nodes run in plan order on the local slice of every replica."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.ir.ids import NodeId
from piper_jax.lowering.collectives import unreduced_key
from piper_jax.lowering.context import Context
from piper_jax.lowering.group_mesh import SLICE
from piper_jax.lowering.keys import ACCUMULATED, Key
from piper_jax.lowering.shards import shard_length
from piper_jax.tracing.flat import Flat, FlatEqn, read
from piper_jax.tracing.passes import kinds_of_terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One compute node of a slot: its flat program, and the arrays that it reads and writes.

    Attributes:
      flat: what it computes, on one slice.
      inputs: for each input of ``flat``, the keys whose sum it is, a seed's kind, or None where it is not read.
      reads, writes: keys from and to the slot; what is ``added`` up is both.
    """

    context: Context
    group: str
    id: NodeId
    flat: Flat
    inputs: tuple[tuple[Key, ...] | str | None, ...]
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    added: frozenset[Key]

    @property
    def mb(self) -> int:
        return self.id.MB or 0

    @property
    def word(self) -> str:
        """What the label of a program calls it, and the names of its instructions begin with."""
        return pass_word(self.id)

    def run(self, env: dict[Key, Any]) -> None:
        """Evaluates the node on local arrays and adds what it writes."""
        values = self.begin(env)
        self.evaluate(self.flat.eqns, values)
        self.end(env, values)

    def begin(self, env: Mapping[Key, Any]) -> dict[int, Any]:
        """The values of ``flat`` before its first equation."""
        values = dict(self.flat.consts)
        for var, source in zip(self.flat.inputs, self.inputs, strict=True):
            if source is not None:
                values[var] = self._input(env, source, self.flat.avals[var].dtype)
        return values

    def evaluate(self, eqns: Iterable[FlatEqn], values: dict[int, Any]) -> None:
        """Adds the results of some of its equations."""
        with jax.named_scope(self.word):
            self.context.replica(self.group).run(eqns, values)

    def end(self, env: dict[Key, Any], values: Mapping[int, Any]) -> None:
        """Adds what it writes."""
        for key, atom in zip(self.writes, self.flat.outputs, strict=True):
            value = jnp.asarray(read(atom, values))
            if key.kind in ("accumulator", "unreduced") and self.context.slices_on(self.group) > 1:
                value = jax.lax.psum(value, SLICE)
            if key.kind in ("unreduced", "carried"):
                value = value.astype(local_spec(self.context, key).dtype)
            env[key] = self._accumulated(env, key, value) if key in self.added else value

    def _input(self, env: Mapping[Key, Any], source: tuple[Key, ...] | str, dtype: Any) -> Any:
        if isinstance(source, str):
            seed = env[Key("seed", self.group)] if source == "total" else jnp.asarray(1.0 / self.context.num_slices)
            return seed.astype(dtype)
        key, index = source[0], env.get(Key("microbatch", self.group, None, self.mb))
        if key.kind == "batch":
            return jax.lax.dynamic_index_in_dim(env[key], index, 0, keepdims=False)
        if key.kind == "key":
            return slice_key(self.context, self.group, env[key], env[Key("step", self.group)], index)
        return env[key] if len(source) == 1 else sum(env[k] for k in source)

    def _accumulated(self, env: Mapping[Key, Any], key: Key, value: Any) -> Any:
        before, index = env[key], env.get(Key("microbatch", self.group, None, self.mb))
        match self.context.reduction_of(key):
            case "samples":
                return jax.lax.dynamic_update_index_in_dim(before, value, index, 0)
            case "last":
                return jnp.where(index == self.context.num_microbatches - 1, value, before)
            case _:
                return before + value.astype(before.dtype)


def pass_word(node: NodeId) -> str:
    """Such as ``F2``."""
    return f"{node.PASS}{'' if node.PP is None else node.PP}"


def slice_key(context: Context, group: str, key: Any, clock: Any, microbatch: Any) -> Any:
    """The random key of a slice, inside a program: of the step, then of the slice's number."""
    number = microbatch * context.replicas + jax.lax.axis_index(context.replica_axes(group))
    return jax.random.fold_in(jax.random.fold_in(key, clock), number)


def step(context: Context, group: str, node: NodeId, begun: set[Key]) -> Step:
    """The step of one compute node: F, B, BI or BW.

    Args:
      begun: sums of gradients that earlier steps have begun; those of this step are added.
    """
    built, mb = context.passes(node.op), node.MB or 0
    chunk = built.chunk
    residuals = [Key("residual", group, (node.op, k), mb) for k in range(built.num_residuals)]
    inputs: list[tuple[Key, ...] | str] = [(k,) for k in _common_keys(context, group, node)]
    experts = context.dispatch_of(node.op) is not None
    if node.PASS == "F":
        flat = built.forward if context.training else built.evaluate
        writes = [dispatched_key(group, node, v) if experts else Key("value", group, v, mb) for v in chunk.exports]
        writes += metric_keys(context, group, node.op)
        carried = [context.carried_key(group, context.program.carried[i].leaf, node.op) for i in chunk.carried]
        if not context.training:
            return _step(context, group, node, _without_last(flat, len(carried)), inputs, writes)
        return _step(context, group, node, flat, inputs, [*writes, *carried, *residuals], _summed(context, carried))
    assert built.backward is not None
    assert built.halves is not None
    inputs += [(k,) for k in residuals]
    given = Key("dispatched_cotangent" if experts else "cotangent", group, None, mb)
    inputs += [
        (given._replace(item=(v, node.op)),) if experts else cotangent_keys(context, group, v, mb)
        for v in chunk.diff_exports
    ]
    inputs += built.kinds
    cotangents = [given._replace(item=(v, node.op)) for v in chunk.diff_externals]
    gradients = [_gradient_key(context, group, leaf, mb) for leaf in chunk.diff_state]
    crossing = [Key("crossing", group, (node.op, k), mb) for k in range(len(built.halves.crossing))]
    if node.PASS == "BI":
        return _step(context, group, node, built.halves.for_inputs, inputs, cotangents + crossing)
    added = begun.intersection(gradients)
    begun.update(gradients)
    if node.PASS == "BW":
        inputs += [(k,) for k in crossing]
        return _step(context, group, node, built.halves.for_weights, inputs, gradients, added)
    return _step(context, group, node, built.backward, inputs, cotangents + gradients, added)


def metric_keys(context: Context, group: str, op: str) -> list[Key]:
    """Where the forward passes of an operation leave partial sums of the loss, and metrics."""
    chunk = context.chunk_of[op]
    terms = [(kind, op) for kind in kinds_of_terms(context.program, chunk)]
    return [Key("metric", group, item) for item in (*terms, *chunk.metrics)]


def _without_last(flat: Flat, count: int) -> Flat:
    """A program without its last outputs."""
    return replace(flat, outputs=flat.outputs[: len(flat.outputs) - count]).without_dead_code() if count else flat


def _summed(context: Context, carried: Sequence[Key]) -> list[Key]:
    """Of carried state, that to which each slice adds what it leaves."""
    return [key for key in carried if not context.is_in_turn(key.item)]


def _gradient_key(context: Context, group: str, leaf: int, mb: int) -> Key:
    owned = context.owned_leaf.get(leaf)
    if owned is not None and owned.span is not None:
        return unreduced_key(context, group, leaf, mb)
    return Key("accumulator", group, leaf)


def _step(
    context: Context,
    group: str,
    node: NodeId,
    flat: Flat,
    inputs: Sequence[tuple[Key, ...] | str],
    writes: Sequence[Key],
    added: Collection[Key] = (),
) -> Step:
    used = {a for e in flat.eqns for a in e.reads()} | {a for a in flat.outputs if isinstance(a, int)}
    kept = tuple(i if v in used else None for i, v in zip(inputs, flat.inputs, strict=True))
    reads = [k for source in kept if isinstance(source, tuple) for k in source]
    reads += [Key("seed", group)] if "total" in kept else []
    summed = [k for k in writes if k.kind in ACCUMULATED or k in added]
    reads += summed
    if any(k.kind == "key" for k in reads):
        reads.append(Key("step", group))
    if any(k.kind in ("key", "batch") or context.reduction_of(k) in ("samples", "last") for k in reads):
        reads.append(Key("microbatch", group, None, node.MB or 0))
    return Step(
        context=context, group=group, id=node, flat=flat, inputs=kept, reads=tuple(dict.fromkeys(reads)),
        writes=tuple(writes), added=frozenset(summed),
    )  # fmt: skip


def _common_keys(context: Context, group: str, node: NodeId) -> list[Key]:
    chunk = context.chunk_of[node.op]
    in_turn = node.PASS == "F"
    return [
        *(
            context.carried_key(group, leaf, node.op)
            if in_turn and context.is_in_turn(leaf)
            else Key("state", group, leaf)
            for leaf in chunk.state
        ),
        *(batch_key(context, group, leaf) for leaf in chunk.batch),
        *([Key("key", group)] if chunk.uses_key else []),
        *(
            Key("value", group, v, node.MB or 0)
            if context.dispatch_of(node.op) is None
            else dispatched_key(group, node, v)
            for v in chunk.externals
        ),
    ]


def dispatched_key(group: str, node: NodeId, value: int) -> Key:
    """A value that enters or leaves a region, on the devices that hold its experts."""
    return Key("dispatched", group, (value, node.op), node.MB or 0)


def batch_key(context: Context, group: str, leaf: int) -> Key:
    """The key of a batch leaf: scalars are shared by all slices."""
    return Key("batch" if context.source.batch.specs[leaf].shape else "shared", group, leaf)


def cotangent_keys(context: Context, group: str, value: int, mb: int) -> tuple[Key, ...]:
    """What adds up to the cotangent of a value: one from each operation that reads it."""
    return tuple(Key("cotangent", group, (value, giver), mb) for giver in context.cotangent_givers[value])


def local_spec(context: Context, key: Key) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array on one replica."""
    match key.kind:
        case "state_shard" | "optimizer_shard" | "gradient_shard" | "accumulator_shard":
            whole = context.whole_spec(key)
            return jax.ShapeDtypeStruct((shard_length(whole.shape, context.shards_of(key)),), whole.dtype)
        case "state" | "optimizer" | "gradient" | "accumulator" | "unreduced" | "carried" | "carried_total":
            return context.whole_spec(key)
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
        case "step" | "microbatch" | "token":
            return jax.ShapeDtypeStruct((), jnp.int32)
        case "seed" | "weight":
            return jax.ShapeDtypeStruct((), jnp.float64 if jax.config.jax_enable_x64 else jnp.float32)
        case "value":
            return _spec(context.program.flat.avals[key.item])
        case "cotangent":
            return _spec(context.program.flat.avals[key.item[0]])
        case "dispatched" | "dispatched_cotangent":
            value, op = key.item
            found = context.dispatch_of(op)
            assert found is not None
            return found.arrived(context.program.flat.avals[value])
        case "residual":
            op, k = key.item
            built = context.passes(op)
            flat = built.forward
            atom = flat.outputs[len(flat.outputs) - built.num_residuals + k]
            return _spec(flat.avals[atom])  # type: ignore[index]
        case "crossing":
            op, k = key.item
            halves = context.passes(op).halves
            assert halves is not None
            return _spec(halves.for_inputs.avals[halves.crossing[k]])
    raise TypeError(f"{key.kind} has no fixed shape")


def _spec(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
