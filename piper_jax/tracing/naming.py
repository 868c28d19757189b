"""Names of units and state buckets, from module paths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from piper_jax.tracing.chunk import Chunk
from piper_jax.tracing.expert_units import Unit
from piper_jax.tracing.flat import FlatEqn
from piper_jax.tracing.model_state import ModelState


def bucket_leaves(state: ModelState, readers: Sequence[tuple[str, ...]]) -> dict[str, tuple[int, ...]]:
    """Leaves with the same kind and the same readers, or none, share a bucket, named by its one reader or first leaf.

    Gradients of a bucket, or what steps carry on, are summed in one dtype, since they move in one collective.
    """
    found: dict[tuple[Any, ...], list[int]] = {}
    for index, (leaf, names) in enumerate(zip(state.leaves, readers, strict=True)):
        summed = leaf.gradient_dtype if leaf.kind == "trainable" else leaf.dtype if leaf.carry else ""
        found.setdefault((leaf.kind, names, summed, leaf.carry), []).append(index)
    buckets: dict[str, tuple[int, ...]] = {}
    for (kind, names, *_), leaves in found.items():
        name = names[0] if len(names) == 1 else state.leaves[leaves[0]].path
        name = name if kind == "trainable" else f"{kind} {name}"
        buckets[_unique(name, buckets)] = tuple(leaves)
    return buckets


def _unique(name: str, taken: Mapping[str, Any] | set[str]) -> str:
    if name not in taken:
        return name
    return next(f"{name}#{k}" for k in range(2, len(taken) + 3) if f"{name}#{k}" not in taken)


def unit_names(
    state: ModelState, parts: Sequence[Chunk], eqns: Sequence[Sequence[FlatEqn]], places: Sequence[Unit]
) -> list[str]:
    """Module paths of the leaves that a unit alone reads, or of its scopes, or the name of the unit before it.

    Experts have the whole path that their leaves share; what follows them in their pipeline unit combines them.
    """
    count: dict[int, int] = {}
    for part in parts:
        for leaf in part.state:
            count[leaf] = count.get(leaf, 0) + 1
    names: list[str] = []
    for unit, part in enumerate(parts):
        alone = [leaf for leaf in part.state if count[leaf] == 1]
        own = alone or list(part.state)
        if places[unit].EP is not None and own:
            names.append(_unique(_shared_path([state.leaves[leaf].path for leaf in own]), set(names)))
            continue
        if places[unit].depth and not alone:
            first = next(k for k, place in enumerate(places) if place.PP == places[unit].PP)
            names.append(_unique(f"{names[first]}.combine", set(names)))
            continue
        roots = list(dict.fromkeys(_module_root(state.leaves[leaf].path) for leaf in own))
        if not roots:
            roots = list(dict.fromkeys(e.path.split(".")[0] for e in eqns[unit] if e.path))
        before = re.sub(r"#\d+$", "", names[-1]) if names else f"unit{unit}"
        names.append(_unique(_label(roots) if roots else before, set(names)))
    return names


def _label(roots: Sequence[str]) -> str:
    """``embed+layers.0-2``: neighbours by number are written as one; ``+...`` after two."""
    runs: list[tuple[str, int, int] | str] = []
    for root in roots:
        match, known = re.fullmatch(r"(.*?)(\d+)", root), runs[-1] if runs else ""
        if match is None:
            runs.append(root)
        elif not isinstance(known, str) and (known[0], known[2] + 1) == (match[1], int(match[2])):
            runs[-1] = (match[1], known[1], int(match[2]))
        else:
            runs.append((match[1], int(match[2]), int(match[2])))
    words = [run if isinstance(run, str) else _run_text(*run) for run in runs]
    return "+".join(words[:2]) + ("+..." if len(words) > 2 else "")


def _run_text(stem: str, first: int, last: int) -> str:
    return f"{stem}{first}" if first == last else f"{stem}{first}-{last}"


def _shared_path(paths: Sequence[str]) -> str:
    """The module that holds all leaves."""
    split = [[p for p in path.split(".") if p != "params"] for path in paths]
    shared = [words[0] for words in zip(*split, strict=False) if len(set(words)) == 1]
    return ".".join(shared if len(shared) < len(split[0]) else shared[:-1]) or paths[0]


def _module_root(path: str) -> str:
    """The first module of a path, or the layer: all until the first number."""
    parts = [p for p in path.split(".") if p != "params"] or [path]
    number = next((k for k, part in enumerate(parts) if k and part.isdigit()), 0)
    return ".".join(parts[: number + 1])
