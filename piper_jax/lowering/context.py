"""A completed DAG about to be lowered: which registers it has, of which shapes, and how they lie on their devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from piper_jax.ir.ownership import Ownership
from piper_jax.lowering.group_mesh import PARTITION, TENSOR, P
from piper_jax.lowering.keys import PER_SLICE, Key, Layout
from piper_jax.lowering.shards import shard_length
from piper_jax.lowering.tables import Tables
from piper_jax.tracing.loss_program import key_spec


@dataclass(frozen=True, kw_only=True)
class Context(Tables):
    """The tables of a lowering, with the shape, dtype and place of each register."""

    def owned_key(self, key: Key) -> Ownership | None:
        """The owners of the bucket that a state, optimizer, gradient or accumulator key belongs to."""
        if not key.kind.startswith("optimizer"):
            return self.owned_leaf.get(key.item)
        bucket = self.source.optimizer.leaf_owner[key.item]  # type: ignore[union-attr]
        return None if bucket is None else self.owned.get(self.source.bucket_names[bucket])

    @cached_property
    def _parts_of_bucket(self) -> dict[str, int]:
        readers = {b: name for name in self._dispatches for b in self.dag.ops[name].reads}
        return {b: self._dispatches[name].num_parts for b, name in readers.items()}

    @cached_property
    def _bucket_of_leaf(self) -> dict[int, str]:
        return {leaf: b for b, leaves in self.source.bucket_leaves.items() for leaf in leaves}

    def parts_of(self, key: Key) -> int:
        """Over how many devices, each with other experts, the array is divided whose whole or sharded form a key names.

        Only state, optimizer leaves and gradients of experts are; a single number is on all of them.
        """
        if not self._parts_of_bucket:
            return 1
        kind, program = key.kind.removesuffix("_shard"), self.source.optimizer
        if kind == "optimizer" and program is not None:
            owner = program.leaf_owner[key.item]
            bucket = None if owner is None else self.source.bucket_names[owner]
            single = program.leaf_specs[key.item].shape == ()
        elif kind in ("state", "gradient", "accumulator", "unreduced"):
            bucket, single = self._bucket_of_leaf[key.item], False
        else:
            return 1
        return 1 if bucket is None or single else self._parts_of_bucket.get(bucket, 1)

    def layout(self, key: Key) -> Layout:
        """How a register is laid out on the mesh of its group."""
        return "experts" if key.layout == "replicated" and self.parts_of(key) > 1 else key.layout

    def partition(self, key: Key) -> P:
        """How a register lies on the mesh of its group, the tensor axis included."""
        spec = PARTITION[self.layout(key)]
        dim = self.tensor_dim(key)
        return spec if dim is None else P(*spec, *[None] * (dim - len(spec)), TENSOR)

    @cached_property
    def _shardings(self) -> dict[tuple[str, P], NamedSharding]:
        return {}

    def sharding(self, key: Key) -> NamedSharding:
        """The same on its devices."""
        known = key.group, self.partition(key)
        if known not in self._shardings:
            self._shardings[known] = NamedSharding(self.meshes[key.group].mesh, known[1])
        return self._shardings[known]

    def tensor_dim(self, key: Key) -> int | None:
        """The dimension of a register that the tensor axis divides; of activations the compiler finds it."""
        if self.tensor == 1:
            return None
        kind, _, form = key.kind.partition("_")
        if form == "shard":
            length = shard_length(self.whole_spec(key).shape, self.shards_of(key))
            return 1 if length % self.tensor == 0 else None
        leaf = key.item
        if kind == "optimizer":
            leaf = self.like_parameter.get(key.item)
        if kind not in ("state", "gradient", "optimizer", "accumulator", "unreduced", "carried") or leaf is None:
            return None
        dim = self.leaf_tensor_dims.get(leaf)
        return None if dim is None else dim + (key.layout == "stacked")

    @cached_property
    def leaf_tensor_dims(self) -> dict[int, int]:
        """The divided dimension of each state leaf that has one."""
        pairs = (
            (index, leaf.tensor_dim)
            for bucket, leaves in self.source.bucket_leaves.items()
            for index, leaf in zip(leaves, self.dag.buckets[bucket].leaves, strict=True)
        )
        return {index: dim for index, dim in pairs if dim is not None}

    @cached_property
    def like_parameter(self) -> dict[int, int]:
        """For each optimizer leaf that has the shape of the parameter whose path ends its own, that parameter."""
        program, state = self.source.optimizer, self.source.state
        found: dict[int, int] = {}
        for k, path in enumerate(program.leaf_paths if program is not None else ()):
            for leaf in state.trainable:
                known = state.leaves[leaf]
                if path.endswith(known.path) and program.leaf_specs[k].shape == known.shape:  # type: ignore[union-attr]
                    found[k] = leaf
        return found

    def register_shape(self, key: Key, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of a register of which each device sees ``local``."""
        match self.layout(key):
            case "stacked":
                return (self.replicas if key.kind in PER_SLICE else self.meshes[key.group].replicas, *local)
            case "batch":
                return (local[0], self.replicas, *local[1:])
            case "experts":
                return (local[0] * self.parts_of(key), *local[1:])
            case _:
                return tuple(local)

    def shards_of(self, key: Key) -> int:
        """Into how many shards ZeRO divides what a key, sharded or whole, belongs to."""
        owned = self.owned_key(key)
        return owned.num_shards if owned is not None else 1

    def held(self, group: str, leaf: int) -> Key:
        """A state leaf as a group keeps it between steps."""
        owned, key = self.owned_leaf.get(leaf), Key("state", group, leaf)
        sharded = owned is not None and owned.num_shards > 1 and owned.replication.shard_params
        return key.shard if sharded else key

    def accumulated(self, group: str, leaf: int) -> Key:
        """Where a group adds up the gradients of a trainable leaf: whole, or, reduced by spans, its shard."""
        key = Key("accumulator", group, leaf)
        return key if self.owned_leaf[leaf].span is None else key.shard

    def first_shard(self, key: Key) -> int:
        """The number of the first of the shards that the key's group holds."""
        owned = self.owned_key(key)
        return 0 if owned is None else self.replicas_before(owned, key.group)

    def whole_spec(self, key: Key) -> jax.ShapeDtypeStruct:
        """Shape and dtype, before any sharding by ZeRO, of the array whose whole or sharded form a key names.

        Of divided experts it is what one device has.
        """
        whole, parts = self.logical_spec(key), self.parts_of(key)
        return whole if parts == 1 else whole.update(shape=(whole.shape[0] // parts, *whole.shape[1:]))

    def logical_spec(self, key: Key) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the leaf that a key belongs to, as the model or the optimizer has it."""
        match key.kind.removesuffix("_shard"):
            case "optimizer":
                return self.source.optimizer.leaf_specs[key.item]  # type: ignore[union-attr]
            case "accumulator" | "unreduced" | "carried_total":
                return self.accumulator_spec(key.item)
            case "carried":
                return self.leaf_spec(key.item) if self.is_in_turn(key.item) else self.accumulator_spec(key.item)
            case _:
                return self.leaf_spec(key.item)

    def leaf_spec(self, leaf: int) -> jax.ShapeDtypeStruct:
        aval = self.program.flat.avals[self.program.state_input(leaf)]
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    def accumulator_spec(self, leaf: int) -> jax.ShapeDtypeStruct:
        """Gradients, and what slices leave of carried state, are summed in at least 32 bits."""
        known = self.leaf_spec(leaf)
        is_float = jnp.issubdtype(known.dtype, jnp.inexact)
        return jax.ShapeDtypeStruct(
            known.shape, jnp.promote_types(known.dtype, jnp.float32 if is_float else known.dtype)
        )

    def metric_spec(self, item: Any) -> jax.ShapeDtypeStruct:
        """The accumulator of a partial loss ``(kind, op)`` or of metric ``index``, on one replica."""
        if isinstance(item, tuple):
            return jax.ShapeDtypeStruct((), jnp.float64 if jax.config.jax_enable_x64 else jnp.float32)
        metric = self.program.metrics[item]
        aval = self.program.flat.avals[metric.atom] if isinstance(metric.atom, int) else metric.atom.aval
        match metric.kind:
            case "samples":
                return jax.ShapeDtypeStruct((self.num_microbatches, *aval.shape), aval.dtype)
            case "last":
                return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            case "mean":
                return jax.ShapeDtypeStruct(aval.shape, jnp.promote_types(aval.dtype, jnp.float32))
            case "sum":
                dtype = jnp.promote_types(
                    aval.dtype, jnp.float32 if jnp.issubdtype(aval.dtype, jnp.inexact) else jnp.int32
                )
                return jax.ShapeDtypeStruct(aval.shape, dtype)

    def reduction_of(self, key: Key) -> str | None:
        """How a metric register takes in a slice's value; None for other registers and partial losses."""
        return self.program.metrics[key.item].kind if key.kind == "metric" and isinstance(key.item, int) else None

    @staticmethod
    def key_spec() -> jax.ShapeDtypeStruct:
        return key_spec()
