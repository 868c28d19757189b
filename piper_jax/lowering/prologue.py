"""What a step needs besides its DAG: zeroed metrics, the weight of a weighted loss, the step counter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from piper_jax.ir.ids import NodeId
from piper_jax.lowering.builder import Builder
from piper_jax.lowering.context import Context
from piper_jax.lowering.instruction import Instruction
from piper_jax.lowering.keys import Key
from piper_jax.lowering.local_program import LocalProgram
from piper_jax.lowering.placing import placed
from piper_jax.lowering.slots import batch_key, local_spec, slice_key
from piper_jax.tracing.flat import read


def prologue(builder: Builder, metrics: Iterable[Key]) -> Iterable[Instruction]:
    """Metric accumulators are zeroed; the weight of a WeightedLoss is summed before the first backward seed."""
    context, metrics = builder.context, tuple(metrics)
    for group in context.here:
        own = tuple(k for k in metrics if k.group == group)
        if own:
            specs = [builder.global_spec(k) for k in own]
            targets = [context.sharding(k) for k in own]
            yield Instruction(
                role="prologue", label=f"zero metrics {group}", call=partial(_zeros, specs, targets), reads=(),
                writes=own,
            )  # fmt: skip
        if any(isinstance(k.item, tuple) and k.item[0] == "total" for k in own):
            node = NodeId(f"all_reduce weight {group}", "F")
            yield builder.local(
                "prologue", group, _weight(context, group), (node,) if node in context.dag.nodes else ()
            )


def _zeros(specs: Sequence[jax.ShapeDtypeStruct], targets: Sequence[Any]) -> list[jax.Array]:
    """Fresh ones on each call: a device may take the memory as it is, and programs then overwrite it."""
    return placed([np.zeros(s.shape, s.dtype) for s in specs], targets)


def _weight(context: Context, group: str) -> LocalProgram:
    program = context.program
    eqns = program.flat.needed([program.weight] if isinstance(program.weight, int) else [])
    used = {a for i in eqns for a in program.flat.eqns[i].reads()} | {a for a in [program.weight] if isinstance(a, int)}
    leaves = program.weight_leaves
    keys = tuple(batch_key(context, group, i) for i in leaves)
    random = (Key("key", group), Key("step", group)) if program.key_input in used else ()
    out = Key("seed", group)

    def one(index: Any, env: dict[Key, Any]) -> Any:
        values = dict(program.flat.consts)
        for leaf, key in zip(leaves, keys, strict=True):
            row = env[key] if key.kind == "shared" else jax.lax.dynamic_index_in_dim(env[key], index, 0, keepdims=False)
            values[program.batch_input(leaf)] = row
        if random:
            values[program.key_input] = slice_key(context, group, *(env[k] for k in random), index)
        context.replica(group).run((program.flat.eqns[i] for i in eqns), values)
        return jnp.asarray(read(program.weight, values)).astype(local_spec(context, out).dtype)  # type: ignore[arg-type]

    def body(env: dict[Key, Any]) -> dict[Key, Any]:
        weights = jax.lax.map(lambda m: one(m, env), jnp.arange(context.num_microbatches))
        total = weights.sum()
        total = (
            jax.lax.psum(total, context.replica_axes(group))
            if isinstance(program.weight, int)
            else total * context.replicas
        )
        return {out: 1.0 / total}

    return LocalProgram(label=f"weight {group}", reads=(*keys, *random), writes=(out,), body=body)


def clocks(builder: Builder) -> Iterable[Instruction]:
    """Groups that update nothing still count the steps."""
    context = builder.context
    if context.source.optimizer is None or not context.training:
        return
    for group in context.here:
        if group not in builder.updates:
            key = Key("step", group)
            advance = LocalProgram(
                label=f"clock {group}",
                reads=(key,),
                writes=(key,),
                body=lambda env: {k: v + 1 for k, v in env.items()},
            )
            yield builder.local("update", group, advance)
