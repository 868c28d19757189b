"""Registers of any groups as plain arrays on one device of this process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from piper_jax import _jax_compat
from piper_jax.lowering.context import Context
from piper_jax.lowering.keys import Key
from piper_jax.lowering.placing import is_random_key
from piper_jax.lowering.slots import local_spec

MESSAGE_BYTES = 1 << 26


def collected(context: Context, registers: Mapping[Key, jax.Array], keys: Sequence[Key], device: Any) -> list[Any]:
    """The arrays of ``keys`` on ``device``. Where several processes run the plan, all of them must ask for the same.

    Args:
      registers: those of this process.
    """
    sharding = SingleDeviceSharding(device)
    if context.process is None:
        return jax.device_put([registers[k] for k in keys], sharding)
    data = zip(keys, collected_data(context, registers, keys), strict=True)
    return [jax.device_put(_from_words(context, key, whole), sharding) for key, whole in data]


def collected_data(
    context: Context, registers: Mapping[Key, jax.Array], keys: Sequence[Key]
) -> Iterator[np.ndarray[Any, Any]]:
    """The same in host memory, one after another; of random keys their data."""
    jax.block_until_ready(list(registers.values()))
    for several in _messages(context, keys):
        own = [_own_part(context, registers, key) for key in several]
        words = np.concatenate([part.reshape(-1).view(np.uint8) for part in own])
        # Sizes are few, because each is a program. Each element comes from one process, the others give zeros: as
        # bytes, their sum is exact for any dtype.
        padded = np.zeros(1 << max(len(words) - 1, 1).bit_length(), np.uint8)
        padded[: len(words)] = words
        found = np.asarray(multihost_utils.broadcast_one_to_all(padded, is_source=True))
        start = 0
        for part in own:
            yield np.frombuffer(found[start : start + part.nbytes].tobytes(), part.dtype).reshape(part.shape)
            start += part.nbytes


def _messages(context: Context, keys: Sequence[Key]) -> Iterator[list[Key]]:
    """The keys in lists of about the size of one message."""
    message, size = [], 0
    for key in keys:
        message.append(key)
        spec = local_spec(context, key)
        each = 4 if is_random_key(spec) else spec.dtype.itemsize
        size += math.prod(context.register_shape(key, spec.shape)) * each
        if size > MESSAGE_BYTES:
            yield message
            message, size = [], 0
    if message:
        yield message


def _own_part(context: Context, registers: Mapping[Key, jax.Array], key: Key) -> np.ndarray[Any, Any]:
    """The elements of which this process has the first copy; zero elsewhere. Of random keys, their words."""
    spec, array = local_spec(context, key), registers.get(key)
    shape, dtype = context.register_shape(key, spec.shape), spec.dtype
    if is_random_key(spec):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = words.shape, words.dtype
        array = None if array is None else jax.jit(jax.random.key_data)(array)
    part = np.zeros(shape, dtype)
    for shard in () if array is None else array.addressable_shards:
        if shard.replica_id == 0:
            part[shard.index] = np.asarray(shard.data)
    return part


def _from_words(context: Context, key: Key, whole: np.ndarray[Any, Any]) -> Any:
    spec = local_spec(context, key)
    return _jax_compat.random_keys(whole, spec.dtype) if is_random_key(spec) else whole
