"""Leaves of a committed step, each held against its hash before anyone uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import tensorstore as ts

from piper_jax.checkpoint.manifest import Item, LeafRecord, Manifest, digest
from piper_jax.errors import CheckpointError, counted
from piper_jax.runtime.host_state import HostState, LeafSpec

THREADS = 8
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A leaf that is not what was written.

    Attributes:
      file: its folder, or the file of it that is at fault.
    """

    item: Item
    leaf: LeafRecord
    file: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.item} {self.leaf.name}: {self.reason} ({self.file})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """One committed step."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> SavedStep:
        """Reads the manifest alone.

        Raises:
          CheckpointError: it is missing or damaged.
        """
        return cls(folder=folder, manifest=Manifest.read(folder))

    def host_state(self) -> HostState:
        """All leaves, verified.

        Raises:
          CheckpointError: names the step, the first damaged leaf, its file and the way out.
        """
        found = list(self._each(self._leaf))
        if damages := [value for _, _, value in found if isinstance(value, Damage)]:
            raise self._damaged(damages)
        given = {"params": {}, "opt_state": {}}
        specs: dict[str, dict[tuple[str, ...], LeafSpec]] = {"params": {}, "opt_state": {}}
        for item, leaf, value in found:
            given[item][leaf.keys] = value
            specs[item][leaf.keys] = LeafSpec(shape=leaf.shape, dtype=leaf.dtype)
        manifest = self.manifest
        key = np.array(manifest.random_key, np.uint32)
        return HostState(**given, specs=specs, random_key=key, step=manifest.step)

    def params(self) -> dict[str, np.ndarray]:
        """Parameters by name, verified; random keys as their data."""
        host = self.host_state()
        return {".".join(keys): value for keys, value in host.params.items()}

    def damages(self) -> list[Damage]:
        """Reads every leaf and tells which are not what was written."""
        return [d for _, _, d in self._each(self._damage) if d is not None]

    def _each(self, read: Callable[[Item, LeafRecord], T]) -> Iterator[tuple[Item, LeafRecord, T]]:
        leaves = list(self.manifest.all_leaves())
        with ThreadPoolExecutor(THREADS) as pool:
            for (item, leaf), value in zip(leaves, pool.map(lambda one: read(*one), leaves), strict=True):
                yield item, leaf, value

    def _damage(self, item: Item, leaf: LeafRecord) -> Damage | None:
        found = self._leaf(item, leaf)
        return found if isinstance(found, Damage) else None

    def _leaf(self, item: Item, leaf: LeafRecord) -> np.ndarray | Damage:
        if 0 in leaf.shape:
            return np.zeros(leaf.shape, np.dtype(leaf.dtype))
        folder = self.folder / item / leaf.name
        try:
            value = _read(folder)
        except ValueError as error:
            return Damage(item=item, leaf=leaf, file=_file(folder), reason=_first_words(error))
        if digest(value) != leaf.sha256:
            reason = "its contents do not fit their hash"
            return Damage(item=item, leaf=leaf, file=_file(folder), reason=reason)
        return value

    def _damaged(self, damages: Iterable[Damage]) -> CheckpointError:
        first, *others = damages
        more = f" (and {counted(len(others), 'more leaf')})" if others else ""
        return CheckpointError(
            f"checkpoint of step {self.manifest.step} is damaged: {first.item} {first.leaf.name}{more}.",
            detail=[str(first), *map(str, others)],
            help=f"go back to an earlier step (checkpoint.on_corrupt=previous), or remove {self.folder}.",
            step=self.manifest.step,
            leaf=first.leaf.name,
            file=str(first.file),
        )


def _read(folder: Path) -> np.ndarray:
    """An array that Orbax wrote; raises ValueError if it cannot be read."""
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder.absolute())}}
    return np.asarray(ts.open(spec, open=True, read=True).result().read().result())


def _file(folder: Path) -> Path:
    """The one file with the numbers of a leaf, or the folder if there are several or none."""
    files = [found for found in folder.glob("*") if found.name != ".zarray"] if folder.is_dir() else []
    return files[0] if len(files) == 1 else folder


def _first_words(error: Exception) -> str:
    """The reason, without what the storage library adds to it."""
    text = str(error).splitlines()[0].split(" [")[0]
    return text if len(text) < 200 else f"{text[:200]}..."
