"""Which leaves of a pytree are trained: by path, ``wrt="*.lora_*"``, or by a tree of booleans like a mask of optax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from piper_jax.arguments import shown
from piper_jax.errors import TraceError, nearest
from piper_jax.ir.filters import under

HELP = 'such as wrt="*.lora_a", wrt=("adapters", "head.bias"), or a tree of booleans with the keys of the parameters.'


def trained_leaves(params: Any, paths: Sequence[str], wrt: Any) -> list[bool]:
    """For each leaf of ``params`` whether ``wrt`` chooses it.

    Args:
      paths: of the leaves.
      wrt: module paths or patterns as in ``where(path=...)``, or booleans in the structure of ``params`` or of its
        upper levels.

    Raises:
      TraceError: neither, or a path of no leaf.
    """
    words = (wrt,) if isinstance(wrt, str) else wrt
    if isinstance(words, tuple | list) and words and all(isinstance(word, str) for word in words):
        plain = [path.removeprefix("params.") for path in paths]
        patterns = tuple(word.removeprefix("params.") for word in words)
        for word, pattern in zip(words, patterns, strict=True):
            if not any(under((pattern,), (path,)) for path in plain):
                fault = f"trace: wrt={shown(wrt)}: no parameter has {word!r}."
                raise TraceError(fault, help=nearest(pattern, plain))
        return [under(patterns, (path,)) for path in plain]
    try:
        found = jax.tree.leaves(jax.tree.broadcast(wrt, params))
    except ValueError:
        found = [None]
    if not all(isinstance(leaf, bool) for leaf in found):
        raise TraceError(f"trace: wrt={shown(wrt)} is no path, nor a tree of booleans like the parameters.", help=HELP)
    return found
