"""Which dimension of each parameter the tensor axis divides, from the names of its dimensions or from its path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import cast

from piper_jax.arguments import shown
from piper_jax.errors import DirectiveError, nearest
from piper_jax.ir.dag import Dag
from piper_jax.ir.forward import Rewritten
from piper_jax.ir.nodes import Leaf
from piper_jax.ir.selection import keep_index

TENSOR = "tensor"
RULES: Mapping[str, str] = dict.fromkeys(
    ("tensor", "model", "tp", "mlp", "heads", "kv_heads", "joined_kv", "kv", "vocab"), TENSOR
)
"""Names of dimensions that the tensor axis divides by default: those of Flax's own models, T5X and MaxText."""
SUCH_AS = 'such as {"mlp": "tensor"}, or pairs.'
Pairs = tuple[tuple[str, object], ...]


def pairs(given: object, name: str) -> Pairs:
    """A mapping from text, or pairs, as pairs; ``name`` is that of the argument.

    Raises:
      DirectiveError: it is neither.
    """
    items = cast(object, cast(Mapping[object, object], given).items() if isinstance(given, Mapping) else given)
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise DirectiveError(
            f"shard: {name}={shown(items)} is no mapping.", help='such as {"mlp": "tensor"}, or pairs.'
        )
    found: list[tuple[str, object]] = []
    for pair in (listed := tuple(cast(Iterable[object], items))):
        parts = tuple(cast(Iterable[object], pair)) if isinstance(pair, tuple | list) else ()
        if len(parts) != 2 or not isinstance(parts[0], str):
            raise DirectiveError(
                f"shard: {name}={shown(listed)} are no pairs of text and value.", help='such as {"mlp": "tensor"}.'
            )
        value = parts[1]
        found.append((parts[0], tuple(cast(Iterable[object], value)) if isinstance(value, list) else value))
    return tuple(found)


def over_tensor_axis(dag: Dag, ops: Iterable[str], rules: object, dims: object) -> Rewritten:
    """Sets ``tensor_dim`` of the leaves that ``ops`` read.

    Args:
      rules: names of dimensions -> mesh axes; None for the usual ones.
      dims: patterns of paths -> dimensions, or None. A path is that of a parameter as the user has it, and the
        dimension one of that; where only a layer of a stack has such a path, the dimension is one of the layer.

    Raises:
      DirectiveError: no leaf has such a name or path, or two dimensions of one are meant.
    """
    known = pairs(RULES if rules is None else rules, "rules")
    wanted = pairs(dims or (), "dims")
    if wrong := [dim for _, dim in wanted if type(dim) is not int]:
        raise DirectiveError(f"dims: {shown(wrong[0])} is no dimension.", help='such as {"*.up.kernel": 1}.')
    of_path = {name: int(str(dim)) for name, dim in wanted}
    divided = {name for name, axes in known if axes == TENSOR or (isinstance(axes, tuple) and TENSOR in axes)}
    read = {bucket for op in ops for bucket in dag.ops[op].reads}
    buckets, matched = dict(dag.buckets), set[str]()
    for name in (b for b in dag.buckets if b in read):
        leaves = tuple(_divided(leaf, divided, of_path, matched) for leaf in dag.buckets[name].leaves)
        buckets[name] = replace(dag.buckets[name], leaves=leaves)
    if unused := sorted(set(of_path) - matched):
        paths = [leaf.given_path for b in dag.buckets.values() for leaf in b.leaves]
        raise DirectiveError(f"dims: no parameter's path matches {unused[0]!r}.", help=nearest(unused[0], paths))
    if not any(leaf.tensor_dim is not None for b in buckets.values() for leaf in b.leaves):
        names = sorted({n for b in dag.buckets.values() for leaf in b.leaves for n in leaf.axis_names if n})
        raise DirectiveError(
            "no parameter has a dimension for the tensor axis.",
            detail=[f"names of dimensions: {', '.join(names) or 'none'}", f"rules: {', '.join(sorted(divided))}"],
            help='name them (with_partitioning), or give rules={"mlp": "tensor"} or dims={"*.up.kernel": 1}.',
        )
    return Rewritten(keep_index(dag, replace(dag, buckets=buckets)))


def _divided(leaf: Leaf, divided: set[str], dims: Mapping[str, int], matched: set[str]) -> Leaf:
    found = [d for d, name in enumerate(leaf.axis_names) if name and divided.intersection(name.split())]
    for pattern, dim in dims.items():
        if fnmatchcase(leaf.given_path, pattern) or fnmatchcase(leaf.path, pattern):
            matched.add(pattern)
            found = [_dimension(leaf, pattern, dim)]
    if len(found) > 1:
        first, second = map(leaf.given_dim, found[:2])
        raise DirectiveError(
            f"the tensor axis would divide {leaf.given_path} {list(leaf.given_shape)} on dimensions {first} and "
            f"{second}.",
            help=f"let one of {', '.join(str(n) for n in leaf.axis_names)} have no rule, or give "
            f"dims={{{leaf.given_path!r}: {first}}}.",
        )
    if leaf.tensor_dim is not None and found and leaf.tensor_dim != found[0]:
        raise DirectiveError(
            f"{leaf.given_path} is divided on dimension {leaf.given_dim(leaf.tensor_dim)} already.",
            help="let each parameter be selected by one shard directive.",
        )
    return replace(leaf, tensor_dim=found[0]) if found else leaf


def _dimension(leaf: Leaf, pattern: str, dim: int) -> int:
    """The dimension of a leaf that ``dim`` is: of what has the path, the user's own parameter or one layer of it."""
    own = leaf.layered if fnmatchcase(leaf.given_path, pattern) else None
    path, shape = (leaf.given_path, leaf.given_shape) if own is not None else (leaf.path, leaf.shape)
    if not -len(shape) <= dim < len(shape):
        raise DirectiveError(
            f"{path} has no dimension {dim}.", help=f"its shape is {list(shape)}; {pattern!r} gives {dim}."
        )
    dim %= len(shape)
    if own is None:
        return dim
    if dim == own.dim:
        raise DirectiveError(
            f"dimension {dim} of {path} {list(shape)} are its layers, which stages divide.",
            help=f"give {pattern!r} another dimension.",
        )
    return dim - (dim > own.dim)
