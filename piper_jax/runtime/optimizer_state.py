"""What the optimizer state of a run says, without gathering it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from piper_jax.errors import RuntimeFault, suggest
from piper_jax.lowering.keys import Key
from piper_jax.runtime.state import StateLayout, TrainState


def single_numbers(layout: StateLayout, state: TrainState, names: Sequence[str]) -> dict[str, jax.Array]:
    """Copies of scalar leaves that every group keeps, by the last part of their paths.

    Raises:
      RuntimeFault: there is no such leaf, or there are several of that name.
    """
    known = layout.single_numbers
    for name in names:
        if len(known.get(name, ())) != 1:
            there = f"several of its numbers are named {name!r}" if name in known else f"it has no number {name!r}"
            raise RuntimeFault(f"scalars: the optimizer state: {there}.", help=suggest(name, known))
    if not all(known[name][0] for name in names):
        raise RuntimeFault(
            "scalars: this process has no group whose parameters are trained, so it keeps no optimizer state.",
            help="read them in another process, or place a trained stage here too.",
        )
    copies = [state.arrays[known[name][0][0]].addressable_data(0) for name in names]
    return dict(zip(names, _copied(copies), strict=True))


@jax.jit
def _copied(values: list[jax.Array]) -> list[jax.Array]:
    """Buffers of their own: those of the state are re-used by the next step."""
    return [jnp.copy(value) for value in values]


def parameters_kept_as(layout: StateLayout, state: TrainState, name: str) -> TrainState:
    """A state whose trained leaves are the optimizer's copies under ``name``, in the form in which parameters are kept.

    Raises:
      RuntimeFault: the optimizer keeps no such copies.
    """
    source = layout.context.source
    assert source.optimizer is not None
    registers, paths = layout.registers(state, "with_params_of"), source.optimizer.leaf_paths
    copies = {f"{name}.{source.state.leaves[i].path}": i for i in source.state.trainable}
    copy_of = {i: k for k, path in enumerate(paths) for text, i in copies.items() if f".{path}".endswith(f".{text}")}
    if len(copy_of) < len(copies):
        raise RuntimeFault(
            f"with_params_of: the optimizer state has no {name!r} of the parameters.",
            help=suggest(name, {part for path in paths for part in path.split(".") if part.isidentifier()}),
        )
    arrays = []
    for key, array in registers.items():
        if key.kind.removesuffix("_shard") == "state" and key.item in copy_of:
            array = _in_form(layout, registers, key, copy_of[key.item])
        arrays.append(array)
    return TrainState(tuple(arrays))


def _in_form(layout: StateLayout, registers: dict[Key, jax.Array], key: Key, copy: int) -> jax.Array:
    """An optimizer leaf as the group of ``key`` keeps that state leaf."""
    kept = Key("optimizer", key.group, copy)
    kept = kept if kept in registers else kept.shard
    dtype = layout.context.whole_spec(key).dtype
    if kept.kind.endswith("_shard") == key.kind.endswith("_shard"):
        return registers[kept].astype(dtype)
    return layout.whole(registers, kept, layout.context.sharding(key)).astype(dtype)
