"""A training state in host memory, as the model and the optimizer have it: whole leaves by path, of no strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from piper_jax.errors import RuntimeFault
from piper_jax.runtime.state import StateLayout, TrainState
from piper_jax.tracing.pieces import join_all, split_all
from piper_jax.tracing.source import Source

KeyPath = tuple[str, ...]
Leaves = Mapping[KeyPath, np.ndarray]
IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSpec:
    """Shape and dtype of a leaf; of random keys the dtype is ``key<...>`` and the shape that of the keys."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """What ``train.to_host`` gives and ``train.from_host`` takes.

    Attributes:
      params, opt_state: leaves by the keys on the way to them in the user's tree and in that of optax; random keys as
        their data.
      specs: what they are, by the same keys: ``{"params": ..., "opt_state": ...}``.
      random_key: data of the key that slices draw from.  step: steps done.
    """

    params: Leaves
    opt_state: Leaves
    specs: Mapping[str, Mapping[KeyPath, LeafSpec]]
    random_key: np.ndarray
    step: int


def leaf_specs(source: Source) -> dict[str, dict[KeyPath, LeafSpec]]:
    """The leaves of the states of all plans of this model and optimizer, by path."""
    state, optimizer = source.state.undivided, source.optimizer
    params = {
        keys: LeafSpec(shape=leaf.shape, dtype=leaf.dtype) for keys, leaf in zip(state.keys, state.leaves, strict=True)
    }
    if optimizer is None:
        return {"params": params, "opt_state": {}}
    joined = jax.tree.leaves(optimizer.build(optimizer.leaf_specs))
    found = (LeafSpec(shape=leaf.shape, dtype=str(leaf.dtype)) for leaf in joined)
    return {"params": params, "opt_state": dict(zip(optimizer.keys, found, strict=True))}


def to_host(layout: StateLayout, state: TrainState, only: int | None = None) -> HostState:
    """Copies a state to host memory, bit for bit.

    Args:
      only: the process that gets it; the others get no leaves.
    """
    source, call, process = layout.context.source, "to_host", layout.context.process
    wanted = only is None or process is None or process == only
    specs = leaf_specs(source)

    def leaves(kind: str, count: int) -> list[np.ndarray]:
        return layout.on_host(state, kind, count, call, wanted=wanted or kind == "step")

    params = leaves("state", len(source.state.leaves))
    params = join_all(params, source.state.leaf_divisions) if wanted else []
    opt_state: Sequence[Any] = ()
    if source.optimizer is not None:
        opt_state = leaves("optimizer", len(source.optimizer.leaf_specs))
        opt_state = join_all(opt_state, source.optimizer.divisions) if wanted else []
    return HostState(
        params={k: np.asarray(v) for k, v in zip(specs["params"], params, strict=wanted)},
        opt_state={k: np.asarray(v) for k, v in zip(specs["opt_state"], opt_state, strict=wanted)},
        specs=specs,
        random_key=leaves("key", 1)[0],
        step=int(leaves("step", 1)[0]),
    )


def from_host(layout: StateLayout, found: HostState) -> TrainState:
    """The state of this plan with the values of ``found``, bit for bit; an optimizer's are left out if it has none.

    Raises:
      RuntimeFault: leaves are missing, or of other shapes or dtypes.
    """
    source = layout.context.source
    wanted = leaf_specs(source)
    given = {"params": found.params, "opt_state": found.opt_state}
    for item, specs in wanted.items():
        for keys, spec in specs.items():
            have = found.specs[item].get(keys)
            if have != spec:
                said = "missing" if have is None else f"{have.dtype}{list(have.shape)}"
                raise RuntimeFault(
                    f"from_host: {item} {'.'.join(keys)} is {said}, but {spec.dtype}{list(spec.shape)} is expected.",
                    help="give the state of the same model and optimizer; the strategy may differ.",
                )
    state = [_device_form(given["params"][keys], spec) for keys, spec in wanted["params"].items()]
    optimizer = [_device_form(given["opt_state"][keys], spec) for keys, spec in wanted["opt_state"].items()]
    return layout.place(
        {
            "state": split_all(state, source.state.leaf_divisions),
            "optimizer": split_all(optimizer, source.optimizer.divisions) if source.optimizer is not None else (),
            "key": [jax.random.wrap_key_data(found.random_key)],
            "step": [found.step],
        }
    )


def _device_form(value: np.ndarray, spec: LeafSpec) -> Any:
    if not spec.dtype.startswith("key<"):
        return value
    named = {str(jax.random.key(0, impl=name).dtype): name for name in IMPLEMENTATIONS}
    return jax.random.wrap_key_data(value, impl=named[spec.dtype])
