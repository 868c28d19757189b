"""The user's parameters (any pytree, or an nnx.Module) as an ordered list of named leaves, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, starmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from piper_jax.arguments import shown
from piper_jax.errors import TraceError
from piper_jax.ir.nodes import Carry, Leaf, LeafKind
from piper_jax.tracing.axis_names import axis_names, is_boxed
from piper_jax.tracing.pieces import Division
from piper_jax.tracing.trained import HELP, trained_leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """How the model's state is laid out.

    Attributes:
      leaves: one per array, in pytree order; shared NNX Variables appear once.
      rng_keys: indices of leaves that hold a random key of the model (NNX); each slice folds its own key into them.
      rng_counts: indices of counters of NNX random streams; constant within a step.
      build: leaf values -> what the loss function receives (params, or a fresh model).
      mutated: that object after the loss function ran -> leaf values.
      skeleton: values by leaf -> the pytree that the optimizer sees, with None for the other leaves.
      carries: what the user declared of how leaves are carried from step to step.
      keys: of each leaf, the keys on the way to it in the user's own tree; only of a state that is not divided.
      whole: the state before stacks of layers were divided, None if none is.  divisions: of its leaves.
    """

    leaves: tuple[Leaf, ...]
    rng_keys: tuple[int, ...]
    rng_counts: tuple[int, ...]
    build: Callable[[Sequence[Any]], Any]
    mutated: Callable[[Any], list[Any]]
    values: Callable[[Any], list[Any]]
    skeleton: Callable[[Mapping[int, Any]], Any]
    carries: Mapping[int, Any]
    keys: tuple[tuple[str, ...], ...] = ()
    whole: ModelState | None = None
    divisions: tuple[Division | None, ...] = ()

    @property
    def undivided(self) -> ModelState:
        """The state as the user has it."""
        return self.whole or self

    @property
    def leaf_divisions(self) -> tuple[Division | None, ...]:
        """How each leaf of ``undivided`` is divided."""
        return self.divisions or (None,) * len(self.leaves)

    @property
    def pieces(self) -> tuple[range, ...]:
        """For each leaf of ``undivided``, the leaves that it is divided into."""
        first = [0, *accumulate(d.count if d is not None else 1 for d in self.leaf_divisions)]
        return tuple(starmap(range, pairwise(first)))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names that the model gives to dimensions."""
        names = (name for leaf in self.undivided.leaves for text in leaf.axis_names for name in (text or "").split())
        return tuple(dict.fromkeys(names))

    @property
    def trainable(self) -> tuple[int, ...]:
        return tuple(i for i, leaf in enumerate(self.leaves) if leaf.kind == "trainable")

    def trainable_tree(self, values: Sequence[Any]) -> Any:
        """Values of the trainable leaves, in order -> the pytree that the optimizer sees."""
        return self.skeleton(dict(zip(self.trainable, values, strict=True)))

    def carrying(self, carried: Mapping[int, Carry]) -> ModelState:
        """The same with leaves that steps carry on, which are not trained."""
        leaves = tuple(
            replace(leaf, kind="mutable", carry=carried[i]) if i in carried else leaf
            for i, leaf in enumerate(self.leaves)
        )
        pairs = enumerate(self.pieces)
        whole = self.whole and self.whole.carrying({i: carried[p[0]] for i, p in pairs if p and p[0] in carried})
        return replace(self, leaves=leaves, whole=whole).required("all of them carried")

    def required(self, what: str) -> ModelState:
        """The same.

        Raises:
          TraceError: nothing in it, which ``what`` says, is trained.
        """
        if not self.trainable:
            raise TraceError(
                f"trace: the parameters ({what}) hold no floating-point array to train.",
                help="pass a pytree of arrays, or an nnx.Module with nnx.Param variables (or wrt=...).",
            )
        return self


NO_NUMBERS = "OUSMm"
"""Kinds of NumPy's dtypes that JAX has not: objects, text, times."""


def model_state(params: Any, wrt: Any = None) -> ModelState:
    """Reads the layout of ``params``.

    Args:
      params: a pytree of arrays or ``jax.ShapeDtypeStruct``, or an ``nnx.Module``. Numbers of Python
        and NumPy are arrays too; other leaves are static.
      wrt: for modules, the Variable type or filter that is trained, ``nnx.Param`` by default; for pytrees, paths or a
        tree of booleans, by default every array of floating-point numbers.

    Raises:
      TraceError: no trainable leaf.
    """
    if isinstance(params, nnx.Module):
        state = _nnx_state(params, nnx.Param if wrt is None else wrt)
    else:
        state = _tree_state(params, wrt)
    if wrt is not None and not state.trainable:
        chosen = wrt.__name__ if isinstance(wrt, type) else shown(wrt)
        of_module = "such as wrt=nnx.LoRAParam for modules with such variables; without wrt all parameters are trained."
        raise TraceError(
            f"trace: wrt={chosen} chooses no floating-point array of the {type(params).__name__}.",
            help=of_module if isinstance(params, nnx.Module) else HELP,
        )
    return state.required(type(params).__name__)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is traced (arrays, specs, NumPy and Python numbers) rather than static."""
    return isinstance(
        leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, float, int, complex)
    ) and not isinstance(leaf, bool)


def spec(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array leaf, as JAX would take it."""
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    array = np.asarray(leaf)
    if array.dtype.kind in NO_NUMBERS:
        raise TraceError(f"trace: an array of {array.dtype}, which is no number.", help="pass arrays of numbers.")
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.ShapeDtypeStruct(array.shape, dtype)


def path_keys(path: Sequence[Any]) -> tuple[str, ...]:
    """The keys of a key path; NNX's trailing ``value`` is left out."""
    parts = tuple(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
    if parts and parts[-1] == "value" and isinstance(path[-1], jax.tree_util.GetAttrKey):
        return parts[:-1]
    return parts


def path_text(path: Sequence[Any]) -> str:
    """A key path as ``layers.0.kernel``."""
    return ".".join(path_keys(path))


def nbytes(aval: Any) -> int:
    """Bytes of an array of this shape and dtype (a random key counts its key data)."""
    itemsize = 8 if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) else np.dtype(aval.dtype).itemsize
    return int(np.prod(aval.shape, dtype=np.int64)) * itemsize


def _leaf(path: Sequence[Any], value: Any, kind: LeafKind, metadata: Any = None) -> Leaf:
    aval, name = spec(value), path_text(path) or "params"
    names = axis_names(metadata)
    if names and len(names) != len(aval.shape):
        raise TraceError(
            f"trace: {name} has {len(aval.shape)} dimensions {list(aval.shape)}, its partitioning names {len(names)}: "
            f"{names}.",
            help="give one name (or None) for each dimension where the parameter is made.",
        )
    return Leaf(
        path=name, shape=tuple(aval.shape), dtype=str(aval.dtype), kind=kind, nbytes=nbytes(aval), axis_names=names
    )


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(spec(value).dtype, jnp.inexact)


def _tree_state(params: Any, wrt: Any) -> ModelState:
    with_path, treedef = jax.tree_util.tree_flatten_with_path(params)
    chosen = [True] * len(with_path)
    if wrt is not None:
        chosen = trained_leaves(params, [path_text(path) for path, _ in with_path], wrt)
    boxes = [box for box in jax.tree.leaves(params, is_leaf=is_boxed) for _ in jax.tree.leaves(box)]
    static = [None if is_array(v) else v for _, v in with_path]
    arrays = [i for i, (_, v) in enumerate(with_path) if is_array(v)]
    leaves = tuple(
        _leaf(*with_path[i], "trainable" if chosen[i] and _is_float(with_path[i][1]) else "constant", boxes[i])
        for i in arrays
    )

    def build(values: Sequence[Any]) -> Any:
        filled = list(static)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        return jax.tree.unflatten(treedef, filled)

    def values(tree: Any) -> list[Any]:
        found, other = jax.tree.flatten(tree)
        if other != treedef:
            raise _other_model(leaves, tree)
        return _checked(leaves, [found[i] for i in arrays])

    def skeleton(chosen: Mapping[int, Any]) -> Any:
        filled: list[Any] = [None] * len(static)
        for k, value in chosen.items():
            filled[arrays[k]] = value
        return jax.tree.unflatten(treedef, filled)

    return ModelState(
        leaves=leaves, rng_keys=(), rng_counts=(), build=build, mutated=lambda tree: [], values=values,
        skeleton=skeleton, carries={}, keys=tuple(path_keys(with_path[i][0]) for i in arrays),
    )  # fmt: skip


def _nnx_state(model: nnx.Module, wrt: Any) -> ModelState:
    graphdef, trained, rest = nnx.split(model, wrt, ...)
    trained_def, rest_def = jax.tree.structure(trained), jax.tree.structure(rest)
    num_trained = trained_def.num_leaves
    with_path = [*jax.tree_util.tree_leaves_with_path(trained), *jax.tree_util.tree_leaves_with_path(rest)]
    kinds: list[LeafKind] = [
        "trainable" if i < num_trained and _is_float(v) else "constant" for i, (_, v) in enumerate(with_path)
    ]
    offset = num_trained
    both = [_variable_of_each_leaf(part) for part in (trained, rest)]
    owner = both[1]
    leaves = tuple(
        _leaf(path, value, kind, variable)
        for (path, value), kind, variable in zip(with_path, kinds, both[0] + owner, strict=True)
    )
    keys = tuple(offset + i for i, v in enumerate(owner) if isinstance(v, nnx.RngKey))
    counts = tuple(offset + i for i, v in enumerate(owner) if isinstance(v, nnx.RngCount))
    carries = {offset + i: v.get_metadata()["carry"] for i, v in enumerate(owner) if "carry" in v.get_metadata()}

    def build(values: Sequence[Any]) -> nnx.Module:
        states = (
            jax.tree.unflatten(trained_def, values[:num_trained]),
            jax.tree.unflatten(rest_def, values[num_trained:]),
        )
        return nnx.merge(graphdef, *states)

    def mutated(built: nnx.Module) -> list[Any]:
        return [leaf for part in nnx.split(built, wrt, ...)[1:] for leaf in jax.tree.leaves(part)]

    def values(other: nnx.Module) -> list[Any]:
        if not isinstance(other, nnx.Module):
            raise _other_model(leaves, other)
        _, other_trained, other_rest = nnx.split(other, wrt, ...)
        if (jax.tree.structure(other_trained), jax.tree.structure(other_rest)) != (trained_def, rest_def):
            raise _other_model(leaves, other)
        return _checked(leaves, [*jax.tree.leaves(other_trained), *jax.tree.leaves(other_rest)])

    def skeleton(chosen: Mapping[int, Any]) -> Any:
        return jax.tree.unflatten(trained_def, [chosen.get(k) for k in range(num_trained)])

    return ModelState(
        leaves=leaves, rng_keys=keys, rng_counts=counts, build=build, mutated=mutated, values=values,
        skeleton=skeleton, carries=carries, keys=tuple(path_keys(path) for path, _ in with_path),
    )  # fmt: skip


def _variable_of_each_leaf(state: Any) -> list[nnx.Variable]:
    variables = jax.tree.leaves(state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    return [v for v in variables for _ in jax.tree.leaves(v)]


def _other_model(leaves: Sequence[Leaf], other: Any) -> TraceError:
    have = [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(other)]
    missing = [leaf.path for leaf in leaves if leaf.path not in have]
    return TraceError(
        "init: these parameters are not those of the traced model.",
        detail=[f"missing: {', '.join(missing[:5])}"] if missing else [f"structure of {type(other).__name__} differs"],
        help="pass the same pytree (or module) structure that was traced, or trace again.",
    )


def _checked(leaves: Sequence[Leaf], values: list[Any]) -> list[Any]:
    for leaf, value in zip(leaves, values, strict=True):
        aval = spec(value)
        if (tuple(aval.shape), str(aval.dtype)) != (leaf.shape, leaf.dtype):
            raise TraceError(
                f"init: {leaf.path} is {aval.dtype}{list(aval.shape)}, but {leaf.dtype}{list(leaf.shape)} was traced.",
                help="pass parameters of the traced shapes and dtypes, or trace again.",
            )
    return values
