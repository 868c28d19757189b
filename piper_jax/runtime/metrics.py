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
from piper_jax.tracing.flat import read
from piper_jax.tracing.passes import SEEDS


@dataclass(frozen=True, kw_only=True)
class MetricGather:
    """Combines the metric registers of one executable on one device."""

    context: Context
    keys: tuple[Key, ...]
    device: Any

    def __call__(self, registers: Sequence[Any]) -> dict[str, Any]:
        """Values of ``keys`` -> ``{"loss": scalar, **aux}``; aux that is no dict, or names a loss, is under "aux"."""
        arrays = jax.device_put(list(registers), SingleDeviceSharding(self.device))
        return self._combine(arrays)

    @cached_property
    def _combine(self) -> Any:
        return jax.jit(self.combined)

    def combined(self, arrays: Sequence[Any]) -> dict[str, Any]:
        by_key = dict(zip(self.keys, arrays, strict=True))
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
    keys = tuple(dict.fromkeys(k for k in written if k.kind in ("metric", "seed")))
    return MetricGather(context=context, keys=keys, device=device)
