"""The few scalars that an optimizer update exchanges between groups and shards, as one vector of 32-bit words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.ir.ownership import Ownership
from piper_jax.lowering.context import Context
from piper_jax.lowering.shards import COMBINE
from piper_jax.tracing.optimizer_program import OptimizerProgram


def num_words(aval: Any) -> int:
    """32-bit words of a value: those of one element, at least one, for each."""
    return math.prod(aval.shape) * max(jnp.dtype(aval.dtype).itemsize // 4, 1)


def pack(values: Sequence[Any]) -> Any:
    """Values of any numeric dtype -> one uint32 vector, bit for bit."""
    return jnp.concatenate([_words(jnp.asarray(v)) for v in values]) if values else jnp.zeros((0,), jnp.uint32)


def unpack(words: Any, avals: Sequence[Any]) -> list[Any]:
    """The inverse of ``pack`` for values of the given shapes and dtypes (trailing words are padding)."""
    values, start = [], 0
    for aval in avals:
        count = num_words(aval)
        values.append(_value(words[start : start + count], aval))
        start += count
    return values


def _words(value: Any) -> Any:
    if jnp.iscomplexobj(value):
        return jnp.concatenate([_words(jnp.real(value)), _words(jnp.imag(value))])
    return jax.lax.bitcast_convert_type(value.astype(_wide(value.dtype)).reshape(-1), jnp.uint32).reshape(-1)


def _value(words: Any, aval: Any) -> Any:
    dtype = jnp.dtype(aval.dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jax.ShapeDtypeStruct(aval.shape, jnp.finfo(dtype).dtype)
        real, imaginary = (_value(half, part) for half in jnp.split(words, 2))
        return jax.lax.complex(real, imaginary)
    if dtype.itemsize == 8:
        words = words.reshape(-1, 2)
    return jax.lax.bitcast_convert_type(words, _wide(dtype)).astype(dtype).reshape(aval.shape)


def _wide(dtype: Any) -> Any:
    """The real dtype of at least 32 bits that holds every number of ``dtype``."""
    if dtype == jnp.bool_ or (dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.integer)):
        return jnp.dtype(jnp.int32)
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """What groups and shards tell each other between rounds of the update.

    Attributes:
      participants: groups that update anything, in order.
      rounds: how many exchanges precede the last program.
    """

    context: Context
    participants: tuple[str, ...]
    rounds: int

    @property
    def program(self) -> OptimizerProgram:
        assert self.context.source.optimizer is not None
        return self.context.source.optimizer

    def sent(self, group: str, k: int) -> tuple[int, ...]:
        """Values that a group sends in round ``k``."""
        return tuple(v for v in self.program.exchanged[k] if group in self._senders(v))

    def width(self, k: int) -> int:
        """32-bit words that each device contributes to exchange ``k``."""
        avals = self.program.flat.avals
        return max(sum(num_words(avals[v]) for v in self.sent(g, k)) for g in self.participants)

    def packed(self, k: int, values: Sequence[Any]) -> Any:
        """What a device sends, as words."""
        words = pack(values)
        return jnp.pad(words, (0, self.width(k) - words.shape[0]))

    def received(self, gathered: Sequence[Any]) -> dict[int, Any]:
        """The values of earlier rounds, each given as ``[devices of all participants, words]``, parts put together."""
        found: dict[int, list[Any]] = {}
        for r, rows in enumerate(gathered):
            start = 0
            for group in self.participants:
                own = rows[start : start + self.context.meshes[group].replicas]
                start += len(own)
                sent = self.sent(group, r)
                avals = [self.program.flat.avals[v] for v in sent]
                parts = jax.vmap(lambda row, avals=avals: tuple(unpack(row, avals)))(own)
                for v, part in zip(sent, parts, strict=True):
                    found.setdefault(v, []).append(part)
        return {v: self._together(v, jnp.concatenate(parts)) for v, parts in found.items()}

    def is_sharded(self, value: int) -> bool:
        """Whether a value's bucket is updated in shards."""
        return self._owned(value).is_divided

    def _owned(self, value: int) -> Ownership:
        owner = self.program.owner[value]
        assert owner is not None
        return self.context.owned[self.context.source.bucket_names[owner]]

    def _senders(self, value: int) -> tuple[str, ...]:
        owners = tuple(g for g in self._owned(value).owners if g in self.participants)
        return owners if self._owned(value).num_shards > 1 and self.is_sharded(value) else owners[:1]

    def _together(self, value: int, parts: Any) -> Any:
        if not self.is_sharded(value):
            return parts[0]
        owned, combine = self._owned(value), self.program.elementwise.combine
        distinct = parts if owned.num_shards > 1 else parts[: owned.num_parts]
        return COMBINE[combine[value]](distinct).astype(parts.dtype)
