"""Which parameters decay."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from piper_jax.errors import ConfigError, nearest
from piper_jax.tracing.model_state import path_text


def decayed(patterns: Sequence[str] | None) -> Callable[[Any], Any]:
    """Parameters -> a mask of the same structure: true for those whose weights decay.

    Args:
      patterns: regular expressions that are searched in paths such as ``layers.0.up.kernel``; None: matrices decay, the
        scales of norms and other vectors do not.
    """
    if patterns is None:
        return lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params)

    def mask(params: Any) -> Any:
        paths = [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        for index, pattern in enumerate(patterns):
            if not any(re.search(pattern, path) for path in paths):
                raise ConfigError(
                    f"optimizer.decay_paths.{index}: {pattern!r} matches no parameter.",
                    help=nearest(pattern, paths),
                )
        return jax.tree.map_with_path(lambda path, _: any(re.search(p, path_text(path)) for p in patterns), params)

    return mask
