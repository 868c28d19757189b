"""Gathers what the forward passes accumulated into one dictionary of plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from piper_jax.lowering.context import Context
from piper_jax.lowering.keys import Key
from piper_jax.lowering.metric_exchange import METRICS, exchanged_metrics, received_metrics
from piper_jax.runtime.excess import is_excess
from piper_jax.tracing.flat import read
from piper_jax.tracing.passes import SEEDS


@dataclass(frozen=True, kw_only=True)
class MetricGather:
    """Combines the metric registers of one executable on one device.

    Attributes:
      keys: what it reads: the registers themselves, or what each process has got of those of all groups.
      device: of this process.
    """

    context: Context
    keys: tuple[Key, ...]
    device: Any

    def __call__(self, registers: Sequence[Any]) -> dict[str, Any]:
        """Values of ``keys`` -> ``{"loss": scalar, **aux}``; aux that is no dict, or names a loss, is under "aux"."""
        return self._combine(self._on_device(registers))

    def _on_device(self, registers: Sequence[Any]) -> list[Any]:
        if self._is_shared:
            registers = [r.addressable_data(0) for r in registers[:1]]
        return jax.device_put(list(registers), SingleDeviceSharding(self.device))

    @cached_property
    def _combine(self) -> Any:
        return jax.jit(lambda arrays: self.combined(self._by_key(arrays)))

    def excess(self, registers: Mapping[Key, Any]) -> dict[Key, Any]:
        """The counts of rows without room among the registers of a run, of all groups."""
        if not self._excess_keys:
            return {}
        found = self._excess_of(self._on_device([registers[k] for k in self.keys])) if self._is_shared else registers
        return {k: found[n] if self._is_shared else found[k] for n, k in enumerate(self._excess_keys)}

    @cached_property
    def _exchanged(self) -> Mapping[str, tuple[Key, ...]]:
        return exchanged_metrics(self.context)

    @cached_property
    def _excess_keys(self) -> tuple[Key, ...]:
        if not self._is_shared:
            return tuple(filter(is_excess, self.keys))
        return tuple(k for keys in self._exchanged.values() for k in keys if is_excess(k))

    @cached_property
    def _excess_of(self) -> Any:
        return jax.jit(lambda arrays: [self._by_key(arrays)[k] for k in self._excess_keys])

    @property
    def _is_shared(self) -> bool:
        return self.context.process is not None

    def _by_key(self, arrays: Sequence[Any]) -> dict[Key, Any]:
        if self._is_shared:
            return received_metrics(self.context, self._exchanged, arrays[0])
        return dict(zip(self.keys, arrays, strict=True))

    def combined(self, by_key: Mapping[Key, Any]) -> dict[str, Any]:
        result = self._loss(by_key)
        leaves = [self._metric(by_key, k) for k in range(len(self.context.program.metrics))]
        aux = jax.tree.unflatten(self.context.program.metrics_tree, leaves)
        if not result:
            return {"aux": aux}
        if aux is None:
            return result
        reserved = {"aux", *result}
        if isinstance(aux, dict) and not reserved & set(aux) and all(isinstance(k, str) for k in aux):
            return {**result, **aux}
        return {**result, "aux": aux}

    def _loss(self, by_key: Mapping[Key, Any]) -> dict[str, Any]:
        terms = {k: v for k, v in by_key.items() if k.kind == "metric" and isinstance(k.item, tuple)}
        terms = {k: v for k, v in terms.items() if k.item[0] in SEEDS}
        if not terms:
            return {}
        seeds = {k.group: v for k, v in by_key.items() if k.kind == "seed"}
        dtype = jax.dtypes.canonicalize_dtype(jnp.float64)
        scale = {"loss": 1.0 / self.context.num_slices, "extra": 1.0 / self.context.num_slices}
        parts = [v.sum() * (scale[k.item[0]] if k.item[0] in scale else seeds[k.group]) for k, v in terms.items()]
        return {"loss": sum(parts).astype(dtype)}  # type: ignore[union-attr]

    def _metric(self, by_key: Mapping[Key, Any], index: int) -> Any:
        metric = self.context.program.metrics[index]
        found = [v for k, v in by_key.items() if k.kind == "metric" and k.item == index]
        if not found:
            return jnp.asarray(read(metric.atom, {}))
        # Each group leaves zeros for the microbatches that run elsewhere.
        value = reduce(jnp.logical_or if found[0].dtype == jnp.bool_ else jnp.add, found)
        match metric.kind:
            case "mean":
                return value.sum(0) / self.context.num_slices
            case "sum":
                return value.sum(0)
            case "last":
                return value[-1]
            case "samples":
                ordered = jnp.moveaxis(value, 0, 1)
                return ordered.reshape(self.context.batch_size, *value.shape[3:])


def metric_gather(context: Context, written: Sequence[Key], device: Any) -> MetricGather:
    """The gather for the metric keys that an executable writes."""
    read = ("metric", "seed") if context.process is None else ("gathered",)
    keys = tuple(dict.fromkeys(k for k in written if k.kind in read and (k.kind != "gathered" or k.item == METRICS)))
    return MetricGather(context=context, keys=keys, device=device)
