"""The training state: one opaque pytree of arrays that live on their groups' devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from piper_jax.errors import RuntimeFault
from piper_jax.lowering.context import Context
from piper_jax.lowering.keys import Key
from piper_jax.lowering.placing import is_random_key, placed
from piper_jax.lowering.shards import from_rows, to_rows
from piper_jax.lowering.slots import local_spec
from piper_jax.lowering.updates import GroupUpdate
from piper_jax.runtime.collecting import collected, collected_data


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer state, random key and step counter. Made by ``train.init``, consumed by ``train.step``."""

    arrays: tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Which array of a TrainState is which.

    Attributes:
      all_keys: of all groups.
    """

    context: Context
    updates: Mapping[str, GroupUpdate]
    all_keys: tuple[Key, ...]

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        """In order of ``TrainState.arrays``: those of groups that this process has devices of."""
        return tuple(k for k in self.all_keys if self.context.is_here(k.group))

    def init(self, params: Any, seed: int) -> TrainState:
        """Copies every leaf onto the groups that own it and initializes the optimizer."""
        source = self.context.source
        values = [_private(v) for v in source.state.values(params)]
        optimizer: Sequence[Any] = ()
        if source.optimizer is not None:
            optimizer = jax.jit(source.optimizer.init)([values[i] for i in source.state.trainable])
        return self.place({"state": values, "optimizer": optimizer, "key": [jax.random.key(seed)], "step": [0]})

    def place(self, leaves: Mapping[str, Sequence[Any]]) -> TrainState:
        """Whole leaves by kind (state, optimizer, key, step), on the groups that own them."""
        arrays = [self._part(k, leaves) for k in self.keys]
        return TrainState(tuple(placed(arrays, [self.context.sharding(k) for k in self.keys], may_alias=False)))

    def _part(self, key: Key, leaves: Mapping[str, Sequence[Any]]) -> Any:
        """A leaf as the key's group keeps it: whole, or its ``[replicas, length]`` of the shards."""
        if key.kind == "step":
            return np.asarray(leaves["step"][0], np.int32)
        value = leaves[key.kind.removesuffix("_shard")][key.item or 0]
        if not key.kind.endswith("_shard"):
            return value
        first = self.context.first_shard(key)
        rows = to_rows(value, self.context.shards_of(key), self.context.parts_of(key))
        return rows[first : first + self.context.meshes[key.group].replicas]

    def registers(self, state: TrainState, call: str) -> dict[Key, jax.Array]:
        """The arrays of ``state`` by key.

        Args:
          call: the user's, such as ``"step"``, for messages.

        Raises:
          RuntimeFault: not a state of this plan, or one that a step has consumed.
        """
        if not isinstance(state, TrainState) or len(state.arrays) != len(self.keys):
            raise RuntimeFault(
                f"{call}: expected the state that train.init returned, got {type(state).__name__}.",
                help="state = train.init(params); state, metrics = train.step(state, batch)",
            )
        if any(a.is_deleted() for a in state.arrays):
            raise RuntimeFault(
                f"{call}: this state was consumed by an earlier step (its buffers were re-used).",
                help="keep the new state: state, metrics = train.step(state, batch)",
            )
        for key, array, shape in zip(self.keys, state.arrays, self._shapes, strict=True):
            if array.shape != shape:
                raise RuntimeFault(
                    f"{call}: this state keeps {key.kind.removesuffix('_shard')} {key.item} as {list(array.shape)} on "
                    f"{key.group}, this plan as {list(shape)}.",
                    help="it is the state of another plan: train.init(other.params(state)) makes one of this plan.",
                )
        return dict(zip(self.keys, state.arrays, strict=True))

    @cached_property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        found = ((key, local_spec(self.context, key).shape) for key in self.keys)
        return tuple(self.context.register_shape(key, shape) for key, shape in found)

    @cached_property
    def single_numbers(self) -> Mapping[str, tuple[tuple[int, ...], ...]]:
        """Numbers of the optimizer state that every group keeps, by the last part of their paths.

        For each leaf of that name, where its copies are in ``keys``.
        """
        program = self.context.source.optimizer
        if program is None:
            return {}
        found: dict[str, list[tuple[int, ...]]] = {}
        leaves = zip(program.leaf_paths, program.leaf_specs, program.leaf_owner, strict=True)
        for leaf, (path, spec, owner) in enumerate(leaves):
            if spec.shape == () and owner is None:
                kept = (n for n, key in enumerate(self.keys) if (key.kind, key.item) == ("optimizer", leaf))
                found.setdefault(path.rpartition(".")[2], []).append(tuple(kept))
        return {name: tuple(copies) for name, copies in found.items()}

    def leaves(self, state: TrainState, kind: str, count: int, device: Any, call: str) -> list[jax.Array]:
        """One copy of each logical leaf of a kind, on ``device``, from its first owner."""
        registers = self.registers(state, call)
        parts = self._parts_of_leaves(kind, count)
        found = iter(collected(self.context, registers, [k for keys in parts for k in keys], device))
        return [self._together(keys, [next(found) for _ in keys]) for keys in parts]

    def on_host(self, state: TrainState, kind: str, count: int, call: str, *, wanted: bool = True) -> list[np.ndarray]:
        """A copy in host memory of each logical leaf of a kind; of random keys their data.

        Where several processes run the plan, all of them must ask for the same.

        Args:
          wanted: False in a process that only helps the others; it gets empty arrays.
        """
        registers = self.registers(state, call)
        parts = self._parts_of_leaves(kind, count)
        if self.context.process is None:
            data = {k: _raw(registers[k]) for keys in parts for k in keys}
            for array in data.values():
                array.copy_to_host_async()
            return [self._whole_on_host(keys, [data[k] for k in keys]) for keys in parts]
        found = collected_data(self.context, registers, [k for keys in parts for k in keys])
        if not wanted:
            return [np.empty(0) for _ in found][:count]
        return [self._whole_on_host(keys, [next(found) for _ in keys]) for keys in parts]

    def _whole_on_host(self, parts: Sequence[Key], arrays: Sequence[jax.Array]) -> np.ndarray:
        if not parts[0].kind.endswith("_shard"):
            return np.array(arrays[0])
        shape = self.context.logical_spec(parts[0]).shape
        return from_rows(np.concatenate(arrays), shape, self.context.parts_of(parts[0]))

    def whole(self, registers: Mapping[Key, jax.Array], key: Key, sharding: jax.sharding.Sharding) -> jax.Array:
        """A copy, laid out as ``sharding`` says, of the leaf that a key of this layout holds whole or in shards.

        Raises:
          RuntimeFault: some of it, or where it is to lie, is of another process.
        """
        parts = self._parts(key)
        if not sharding.is_fully_addressable or not self.context.is_alone(*(k.group for k in parts)):
            raise RuntimeFault(
                f"evaluate: {key.kind} {key.item} would have to move to {key.group} from other processes.",
                help="with several processes, evaluate and predict with functions that follow the stages.",
            )
        return self._together(parts, [jax.device_put(registers[k], sharding) for k in parts])

    def _parts_of_leaves(self, kind: str, count: int) -> list[list[Key]]:
        """For each logical leaf of a kind, the keys that together hold it on its first owner."""
        held = {key.item or 0: key for key in reversed(self.all_keys) if key.kind.removesuffix("_shard") == kind}
        return [self._parts(held[i]) for i in range(count)]

    def _parts(self, key: Key) -> list[Key]:
        """The keys that together hold the leaf of one of them: itself, or the shards of all owners, in order."""
        if not key.kind.endswith("_shard"):
            return [key]
        return [k for k in self.all_keys if (k.kind, k.item) == (key.kind, key.item)]

    def _together(self, parts: Sequence[Key], arrays: Sequence[jax.Array]) -> jax.Array:
        if not parts[0].kind.endswith("_shard"):
            return _private(arrays[0])
        shape = self.context.logical_spec(parts[0]).shape
        return from_rows(jnp.concatenate(arrays), shape, self.context.parts_of(parts[0]))


def state_layout(context: Context, updates: Mapping[str, GroupUpdate]) -> StateLayout:
    """The layout for one plan; it does not depend on the batch size."""
    keys: list[Key] = []
    for group in context.meshes:
        keys += [context.held(group, leaf) for leaf in context.group_leaves[group]]
        if context.source.optimizer is not None and group in updates:
            keys += updates[group].optimizer_keys
        keys += [Key("key", group), Key("step", group)]
    return StateLayout(context=context, updates=updates, all_keys=tuple(keys))


def _private(value: Any) -> jax.Array:
    """A copy that nobody else holds."""
    return jax.random.clone(value) if is_random_key(value) else jnp.array(value, copy=True)


def _raw(value: jax.Array) -> jax.Array:
    return jax.random.key_data(value) if is_random_key(value) else value
