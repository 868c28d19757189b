"""What a folder of checkpoints holds, as text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp

from piper_jax.checkpoint.folder import StepFolder
from piper_jax.checkpoint.manifest import ITEMS, LeafRecord
from piper_jax.checkpoint.reading import SavedStep
from piper_jax.errors import counted
from piper_jax.ir.columns import aligned, bytes_text

HEADER = ("leaf", "shape", "dtype", "bytes", "sha256")


def opened(path: Path, step: int | None) -> tuple[StepFolder, SavedStep]:
    """The checkpoints that ``path`` means, and one of them, the newest by default.

    Args:
      path: the folder of a run, of its checkpoints, or of one step.

    Raises:
      CheckpointError: there is no such step, or it is damaged.
    """
    path = path.absolute()
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    elif path.name.isdigit() and step is None:
        path, step = path.parent, int(path.name)
    folder = StepFolder(path=path)
    return folder, SavedStep.open(folder.of(folder.existing(step)[0]))


def inspection_text(folder: StepFolder, saved: SavedStep, *, verify: bool) -> tuple[str, bool]:
    """Steps, leaves and their bytes, and whether all leaves that were read fit their hashes.

    Args:
      verify: read every leaf and hold it against its hash.
    """
    manifest = saved.manifest
    damages = {(d.item, d.leaf.name): d for d in saved.damages()} if verify else {}
    head = [
        f"steps    {', '.join(map(str, folder.steps()))} in {folder.path}",
        f"step     {manifest.step}, written by {', '.join(f'{k} {v}' for k, v in manifest.versions.items())}",
        f"data     {manifest.data}",
    ]
    rows: list[tuple[str, ...]] = []
    for item, leaf in manifest.all_leaves():
        found = "DAMAGED" if (item, leaf.name) in damages else "ok" if verify else ""
        shape = str(list(leaf.shape))
        rows.append(
            (f"{item} {leaf.name}", shape, leaf.dtype, bytes_text(_nbytes(leaf)), f"{leaf.sha256[:12]} {found}")
        )
    tail = list(_totals(saved))
    tail += [f"DAMAGED  {damage}" for damage in damages.values()]
    if verify and not damages:
        tail.append(f"verified {counted(len(rows), 'leaf')}: all are what was written")
    return "\n".join([*head, "", *aligned(HEADER, rows, left=3, left_from=4), "", *tail]), not damages


def _totals(saved: SavedStep) -> Iterator[str]:
    for item in ITEMS:
        leaves = saved.manifest.leaves[item]
        yield f"{item:<11}{counted(len(leaves), 'leaf')}, {bytes_text(sum(map(_nbytes, leaves)))}"


def _nbytes(leaf: LeafRecord) -> int:
    itemsize = 8 if leaf.dtype.startswith("key<") else jnp.dtype(leaf.dtype).itemsize
    return math.prod(leaf.shape) * itemsize
