"""One batch size, compiled: the executor with everything that a call needs besides state and batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from piper_jax.lowering.context import Context
from piper_jax.lowering.instruction import Instruction, require_unspoiled
from piper_jax.lowering.keys import Key
from piper_jax.lowering.placing import placed
from piper_jax.lowering.slots import local_spec
from piper_jax.runtime.executor import Executor
from piper_jax.runtime.metrics import MetricGather, metric_gather


@dataclass(frozen=True, kw_only=True)
class Ready:
    """An executor for batches of one size.

    Attributes:
      batch_keys: where leaves of the batch are read.
      constants: microbatch numbers, on every group that reads them.
    """

    context: Context
    executor: Executor
    gather: MetricGather
    batch_keys: tuple[Key, ...]
    constants: dict[Key, jax.Array]

    def rows(self) -> tuple[int, ...]:
        """The rows of the batch that devices of this process read, ascending."""
        found = self.context
        numbers = np.arange(found.batch_size).reshape(found.num_microbatches, found.replicas, -1)
        read = np.zeros(numbers.shape, bool)
        for key in self.batch_keys:
            if key.kind == "batch":
                for index in found.sharding(key).addressable_devices_indices_map(numbers.shape).values():
                    read[index] = True
        return tuple(numbers[read].tolist())

    def placed(self, values: Sequence[Any]) -> dict[Key, jax.Array]:
        """Batch leaves ``[batch, ...]`` as ``[microbatches, replicas, rows, ...]`` on the groups that read them."""
        found = self.context
        shape = (found.num_microbatches, found.replicas, found.batch_size // found.num_slices)
        split = [v.reshape(*shape, *v.shape[1:]) if v.ndim else v for v in map(_array, values)]
        arrays = placed([split[k.item] for k in self.batch_keys], _targets(found, self.batch_keys))
        return dict(zip(self.batch_keys, arrays, strict=True))


def prepare(
    context: Context,
    instructions: Sequence[Instruction],
    wanted: Sequence[Key],
    device: Any,
    consumed: Sequence[Key] = (),
) -> Ready:
    """Numbers the registers and places the constants.

    Args:
      wanted: registers to keep, besides those of metrics.
      device: where metrics are gathered.
      consumed: given registers that nobody needs after their last use.

    Raises:
      RuntimeFault: an instruction reads what another one has overwritten.
    """
    require_unspoiled(instructions)
    gather = metric_gather(context, [k for i in instructions for k in i.writes], device)
    executor = Executor(instructions, (*wanted, *gather.keys, *token_keys(context)), consumed)
    numbers = tuple(k for k in executor.inputs if k.kind == "microbatch")
    constants = placed([np.int32(k.mb or 0) for k in numbers], _targets(context, numbers))
    return Ready(
        context=context,
        executor=executor,
        gather=gather,
        batch_keys=tuple(k for k in executor.inputs if k.kind in ("batch", "shared")),
        constants=dict(zip(numbers, constants, strict=True)),
    )


def accumulator_keys(found: Context) -> tuple[Key, ...]:
    """Gradient accumulators: zero between steps, kept by the Train object and not by the state."""
    pairs = ((g, leaf) for g in found.here for leaf in found.group_leaves[g] if leaf in found.trainable_index)
    return tuple(found.accumulated(g, leaf) for g, leaf in pairs)


def first_gradients(found: Context) -> tuple[Key, ...]:
    """The gradient of each trainable leaf, on the first group that owns it."""
    owner = {leaf: g for g, leaves in reversed(found.group_leaves.items()) for leaf in leaves}
    return tuple(Key("gradient", owner[leaf], leaf) for leaf in found.source.state.trainable)


def token_keys(found: Context) -> tuple[Key, ...]:
    """What the programs of each group hand on, from call to call as well."""
    return tuple(Key("token", g) for g in found.here) if found.needs_tokens else ()


def accumulators(found: Context) -> dict[Key, Any]:
    """Gradient accumulators of a step that has not begun."""
    return _zeros(found, accumulator_keys(found))


def tokens(found: Context) -> dict[Key, Any]:
    """Tokens of groups that have not run."""
    return _zeros(found, token_keys(found))


def _zeros(found: Context, keys: Iterable[Key]) -> dict[Key, Any]:
    made: dict[Key, Any] = {}
    for key in keys:
        local = local_spec(found, key)
        shape, sharding = found.register_shape(key, local.shape), found.sharding(key)
        made[key] = _zeros_program(shape, local.dtype, sharding)()
    return made


@lru_cache(maxsize=4096)
def _zeros_program(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], jax.Array]:
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)


def _array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else np.asarray(value)


def _targets(context: Context, keys: Sequence[Key]) -> list[Any]:
    return [context.sharding(k) for k in keys]
