"""Where several processes run a plan, each gets the metrics of all groups: ONE all_gather after the last update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.ir.nodes import Compute
from piper_jax.lowering.builder import Builder
from piper_jax.lowering.communication import gathered_words
from piper_jax.lowering.context import Context
from piper_jax.lowering.exchange import num_words, pack, unpack
from piper_jax.lowering.group_mesh import SLICE
from piper_jax.lowering.instruction import Instruction
from piper_jax.lowering.keys import PER_SLICE, Key
from piper_jax.lowering.local_program import LocalProgram
from piper_jax.lowering.slots import local_spec, metric_keys
from piper_jax.lowering.token_exchange import TokenExchange, token_exchanges

METRICS = "metrics"


def metric_exchange(builder: Builder) -> list[Instruction]:
    """Packs what each group of this process accumulated, and gathers it over all groups."""
    context = builder.context
    groups, keys = tuple(context.meshes), exchanged_metrics(context)
    width = max(_num_words(context, keys[g]) for g in groups)
    packed = [builder.local("metrics", g, _packed(context, g, keys[g], width)) for g in context.here]
    return [*packed, gathered_words(builder, "metrics", groups, METRICS, width)]


def exchanged_metrics(context: Context) -> dict[str, tuple[Key, ...]]:
    """For each group, what it accumulates; known of groups of other processes too."""
    found: dict[str, dict[Key, None]] = {g: {} for g in context.meshes}
    exchanges = token_exchanges(context)
    for node in context.dag.nodes.values():
        group = str(node.group)
        if isinstance(node, Compute) and node.id.PASS == "F":
            found[group].update(dict.fromkeys(metric_keys(context, group, node.id.op)))
        exchange: TokenExchange | None = exchanges.get(node.id)
        if exchange is not None and exchange.excess is not None:
            found[group][exchange.excess] = None
    for group, keys in found.items():
        if any(isinstance(k.item, tuple) and k.item[0] == "total" for k in keys):
            keys[Key("seed", group)] = None
    return {group: tuple(keys) for group, keys in found.items()}


def received_metrics(context: Context, exchanged: Mapping[str, Sequence[Key]], words: Any) -> dict[Key, Any]:
    """The arrays of all groups as they have them, from ``[devices of all groups, width]`` words.

    Args:
      exchanged: as ``exchanged_metrics`` gives them.
    """
    found: dict[Key, Any] = {}
    start = 0
    for group, keys in exchanged.items():
        rows = words[start : start + context.meshes[group].replicas]
        start += len(rows)
        specs = _specs(context, group, keys)
        values = jax.vmap(lambda row, specs=specs: tuple(unpack(row, specs)))(rows)
        for key, value in zip(keys, values, strict=True):
            several = key.kind in PER_SLICE and context.slices_on(group) > 1
            whole = value.reshape(-1, *value.shape[2:]) if several else value
            found[key] = whole if key.layout == "stacked" else whole[0]
    return found


def _specs(context: Context, group: str, keys: Sequence[Key]) -> list[jax.ShapeDtypeStruct]:
    """What one device of a group has of each key: with several slices, all of them."""
    count, specs = context.slices_on(group), [local_spec(context, k) for k in keys]
    return [
        s.update(shape=(count, *s.shape)) if count > 1 and k.kind in PER_SLICE else s
        for k, s in zip(keys, specs, strict=True)
    ]


def _num_words(context: Context, keys: Sequence[Key]) -> int:
    return sum(num_words(s) for s in _specs(context, keys[0].group, keys)) if keys else 0


def _packed(context: Context, group: str, keys: tuple[Key, ...], width: int) -> LocalProgram:
    out, several = Key("exchange", group, METRICS), context.slices_on(group) > 1

    def body(env: Mapping[Key, Any]) -> dict[Key, Any]:
        own = [jax.lax.all_gather(env[k], SLICE) if several and k.kind in PER_SLICE else env[k] for k in keys]
        words = pack(own)
        return {out: jnp.pad(words, (0, width - words.shape[0]))}

    return LocalProgram(label=f"metrics {group}", reads=keys, writes=(out,), body=body)
