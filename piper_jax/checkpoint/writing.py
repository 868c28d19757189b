"""How Orbax writes a step: parameters and optimizer state as its pytrees, one folder a leaf, and the manifest."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from piper_jax.checkpoint.manifest import ITEMS, MANIFEST, Item, LeafRecord, Manifest, digest
from piper_jax.errors import CheckpointError
from piper_jax.runtime.host_state import HostState, KeyPath

HASHING_THREADS = 4


class ManifestHandler(ocp.AsyncCheckpointHandler):
    """Makes and writes the manifest in the background, at the same time as the arrays."""

    async def async_save(self, directory: Any, args: ManifestSave) -> list[ocp.future.Future]:
        async def write() -> None:
            self.save(directory, args)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="manifest")]

    def save(self, directory: Any, args: ManifestSave) -> None:
        (Path(directory) / MANIFEST.name).write_text(args.make().text(), encoding="utf-8")

    def restore(self, directory: Any, args: Any = None) -> Manifest:
        return Manifest.read(Path(directory).parent)


@ocp.args.register_with_handler(ManifestHandler, for_save=True, for_restore=True)
@dataclass
class ManifestSave(ocp.args.CheckpointArgs):
    """What makes the manifest; called in the background."""

    make: Callable[[], Manifest]


def step_writer(on_commit: Callable[[], None]) -> ocp.AsyncCheckpointer:
    """What writes steps in the background; of several processes, in the first alone.

    Args:
      on_commit: called there once a step is in its place.
    """
    _silence()
    only = ocp.options.MultiprocessingOptions()
    if jax.process_count() > 1:  # the first process has all in host memory and writes alone
        only = ocp.options.MultiprocessingOptions(0, active_processes={0}, barrier_sync_key_prefix="piper")
    plain = {"use_ocdbt": False, "use_zarr3": False, "multiprocessing_options": only}
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=only),
        manifest=ManifestHandler(),
        **{item: ocp.PyTreeCheckpointHandler(**plain) for item in ITEMS},
    )
    options = ocp.options.AsyncOptions(post_finalization_callback=on_commit)
    return ocp.AsyncCheckpointer(handler, async_options=options, multiprocessing_options=only)


def step_contents(host: HostState, data: Any, config: Any, versions: Mapping[str, str]) -> ocp.args.Composite:
    """What a step consists of, as Orbax takes it.

    Raises:
      CheckpointError: two leaves would have one name.
    """
    leaves: dict[Item, Mapping[KeyPath, np.ndarray]] = {"params": host.params, "opt_state": host.opt_state}

    def make() -> Manifest:
        with ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="hashing") as pool:
            records = {
                item: tuple(
                    LeafRecord(keys=keys, shape=spec.shape, dtype=spec.dtype, sha256=found)
                    for (keys, spec), found in zip(
                        host.specs[item].items(), pool.map(digest, arrays.values()), strict=True
                    )
                )
                for item, arrays in leaves.items()
            }
        return Manifest(
            step=host.step, random_key=tuple(host.random_key.tolist()), leaves=records, data=data, config=config,
            versions=versions,
        )  # fmt: skip

    trees = {item: nested(arrays) for item, arrays in leaves.items()}
    items = {item: ocp.args.PyTreeSave(tree) for item, tree in trees.items() if tree}
    return ocp.args.Composite(**items, manifest=ManifestSave(make))


def nested(leaves: Mapping[KeyPath, np.ndarray]) -> dict[str, Any]:
    """Leaves as a dict of dicts; those without elements, which Orbax does not store, are only in the manifest."""
    names: dict[str, KeyPath] = {}
    tree: dict[str, Any] = {}
    for keys, value in leaves.items():
        name = ".".join(keys)
        if name in names or "/" in name:
            other = f"both {keys} and {names[name]} are" if name in names else f"{keys} is"
            raise CheckpointError(f"checkpoint: {other} called {name!r}.", help="rename a module of the model.")
        names[name] = keys
        inner = tree
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        if value.size:
            inner[keys[-1]] = value
    return tree


@cache
def _silence() -> None:
    """Of a save that fails, Orbax and TensorStore print from many threads what the CheckpointError says."""
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: ".orbax-checkpoint-tmp" not in record.getMessage())
    before = sys.unraisablehook

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        if str(found.exc_value) != "Event loop is closed":
            before(found)

    sys.unraisablehook = unraisable
