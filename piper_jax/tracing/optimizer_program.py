"""The optimizer update as one flat program, partitioned by the state buckets that its values belong to.

A value belongs to a bucket (it derives from that bucket's gradients, parameters or moments alone), to none (step
counts, schedules: every group computes it), or it is mixed: a scalar of several buckets, or of several leaves of one (a
global norm). What a mixing equation reads is exchanged between groups and shards after a round; then every group
computes the mixed values for itself, with the very equations of the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from piper_jax.errors import TraceError
from piper_jax.tracing.elementwise import Elementwise, elementwise
from piper_jax.tracing.flat import Atom, Flat, FlatEqn, flatten
from piper_jax.tracing.model_state import ModelState, nbytes, path_keys, path_text
from piper_jax.tracing.opening import opened
from piper_jax.tracing.pieces import Division, divisions_through, join_all, split_all

MIXED = -1
MAX_EXCHANGED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerProgram:
    """Inputs of ``flat``: gradients, parameters (both of the trainable leaves, in order), optimizer leaves.

    Outputs: new parameters, then new optimizer leaves.

    Attributes:
      owner: for each value, a bucket index, None, or MIXED.
      exchanged: for each round, the bucket-owned values that mixed equations read.
      leaf_owner: for each optimizer leaf, a bucket index, or None where every group keeps it.
      elementwise: what may be computed on flat shards.
      init: trainable leaf values -> optimizer leaf values.
      tree: treedef of the optax state.  divisions: of its leaves, where they hold stacks of layers.
    """

    flat: Flat
    num_trainable: int
    owner: tuple[int | None, ...]
    exchanged: tuple[tuple[int, ...], ...]
    leaf_owner: tuple[int | None, ...]
    elementwise: Elementwise
    leaf_paths: tuple[str, ...]
    leaf_specs: tuple[jax.ShapeDtypeStruct, ...]
    tree: Any
    divisions: tuple[Division | None, ...]
    optimizer: Any
    state: ModelState

    def init(self, trainable: Sequence[Any]) -> list[Any]:
        return split_all(jax.tree.leaves(self.optimizer.init(self.state.trainable_tree(trainable))), self.divisions)

    def build(self, leaves: Sequence[Any]) -> Any:
        """Leaf values -> the optax state."""
        return jax.tree.unflatten(self.tree, join_all(leaves, self.divisions))

    @property
    def keys(self) -> tuple[tuple[str, ...], ...]:
        """Of each leaf of the optax state, the keys on the way to it."""
        numbered = jax.tree.unflatten(self.tree, range(self.tree.num_leaves))
        return tuple(path_keys(path) for path, _ in jax.tree_util.tree_leaves_with_path(numbered))

    def leaf_nbytes(self, leaf: int) -> int:
        return nbytes(self.leaf_specs[leaf])

    def gradient_input(self, k: int) -> int:
        return self.flat.inputs[k]

    def param_input(self, k: int) -> int:
        return self.flat.inputs[self.num_trainable + k]

    def leaf_input(self, k: int) -> int:
        return self.flat.inputs[2 * self.num_trainable + k]

    def param_output(self, k: int) -> Atom:
        return self.flat.outputs[k]

    def leaf_output(self, k: int) -> Atom:
        return self.flat.outputs[self.num_trainable + k]


def trace_optimizer(optimizer: Any, state: ModelState, bucket_of: Sequence[int]) -> OptimizerProgram:
    """Traces ``optimizer.update`` and ``optax.apply_updates`` over all trainable leaves and partitions the result.

    Args:
      optimizer: an ``optax.GradientTransformation``.
      state: layout of the model's state.
      bucket_of: the bucket of each trainable leaf, in order.

    Raises:
      TraceError: arrays of several buckets are mixed whole (only scalars may be).
    """
    whole = state.undivided
    specs = [_leaf_spec(whole.leaves[i]) for i in whole.trainable]
    tree = whole.trainable_tree(specs)
    leaves_with_path, treedef = jax.tree_util.tree_flatten_with_path(jax.eval_shape(optimizer.init, tree))
    leaf_specs = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for _, v in leaves_with_path)

    def update(gradients: Sequence[Any], params: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        updates, after = optimizer.update(
            whole.trainable_tree(gradients), jax.tree.unflatten(treedef, leaves), whole.trainable_tree(params)
        )
        new = optax.apply_updates(whole.trainable_tree(params), updates)
        return [*jax.tree.leaves(new), *jax.tree.leaves(after)]

    try:
        traced = jax.make_jaxpr(update)(specs, specs, list(leaf_specs))
    except TypeError as error:
        raise TraceError(
            f"optimizer: its update cannot be traced: {error}",
            help="updates that need more than gradients, state and parameters (value=) cannot be planned yet.",
        ) from error
    flat = flatten(traced, select_branches=True).without_dead_code()
    trained = [state.leaf_divisions[i] for i in whole.trainable]
    divisions = _leaf_divisions(flat, trained, len(leaf_specs))
    flat = opened(flat, [*trained, *trained, *divisions], [*trained, *divisions]).without_dead_code()
    pieces = [
        (name, leaf if division is None else leaf.update(shape=division.piece_shape(leaf.shape)))
        for (path, _), leaf, division in zip(leaves_with_path, leaf_specs, divisions, strict=True)
        for name in _piece_names(path_text(path), division, state)
    ]
    owner, leaf_owner = _owners(flat, len(bucket_of), list(bucket_of), len(pieces))
    owner = _mixed_late(flat, owner)
    return OptimizerProgram(
        flat=flat,
        num_trainable=len(bucket_of),
        owner=owner,
        exchanged=_exchanges(flat, owner),
        leaf_owner=leaf_owner,
        elementwise=elementwise(flat, owner, MIXED),
        leaf_paths=tuple(name for name, _ in pieces),
        leaf_specs=tuple(found for _, found in pieces),
        tree=treedef,
        divisions=tuple(divisions),
        optimizer=optimizer,
        state=state,
    )


def _piece_names(path: str, division: Division | None, state: ModelState) -> list[str]:
    """Names of the pieces of an optimizer leaf: where it is named after a parameter, those of that parameter's."""
    if division is None:
        return [path]
    for leaf, known, pieces in zip(state.undivided.leaves, state.leaf_divisions, state.pieces, strict=True):
        if known and known.count == division.count and f".{path}".endswith(f".{leaf.path}"):
            return [path.removesuffix(leaf.path) + state.leaves[k].path for k in pieces]
    return [f"{path}.{k}" for k in range(division.count)]


def _leaf_divisions(flat: Flat, trained: Sequence[Division | None], num_leaves: int) -> list[Division | None]:
    """Least fixed point: an optimizer leaf is divided as its next value is."""
    divisions: list[Division | None] = [None] * num_leaves
    while any(trained):
        found = divisions_through(flat, [*trained, *trained, *divisions])[len(trained) :]
        if found == divisions:
            break
        divisions = found
    return divisions


def _leaf_spec(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jax.numpy.dtype(leaf.dtype))


def _join(owners: Iterable[int | None], *, scalar: bool = False) -> int | None:
    """Where a value lives that derives from values of ``owners``.

    An array scaled by a mixed scalar stays with its bucket; a scalar that has met a mixed one is mixed, so that a
    running sum over buckets needs one exchange and not one per bucket.
    """
    found = {o for o in owners if o is not None}
    buckets = found - {MIXED}
    if len(buckets) > 1 or (scalar and MIXED in found):
        return MIXED
    return next(iter(buckets or found), None)


def _owners(
    flat: Flat, num: int, bucket_of: list[int], num_leaves: int
) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """Least fixed point: an optimizer leaf belongs where its next value does."""
    leaf_owner: list[int | None] = [None] * num_leaves
    scalars = _scalars_of_several_leaves(flat, num)
    while True:
        owner: list[int | None] = [None] * len(flat.avals)
        given = [*bucket_of, *bucket_of, *(None if o == MIXED else o for o in leaf_owner)]
        for value, o in zip(flat.inputs, given, strict=True):
            owner[value] = o
        for eqn in flat.eqns:
            joined = _join((owner[a] for a in eqn.reads()), scalar=_is_scalar(flat, eqn))
            for o in eqn.outputs:
                owner[o] = MIXED if o in scalars else joined
        following = [owner[a] if isinstance(a, int) else None for a in flat.outputs[num:]]
        joined_leaves = [_join([before, after]) for before, after in zip(leaf_owner, following, strict=True)]
        if joined_leaves == leaf_owner:
            return tuple(owner), tuple(None if o == MIXED else o for o in leaf_owner)
        leaf_owner = joined_leaves


def _is_scalar(flat: Flat, eqn: FlatEqn) -> bool:
    return all(flat.avals[o].shape == () for o in eqn.outputs)


def _scalars_of_several_leaves(flat: Flat, num: int) -> frozenset[int]:
    """Scalars that derive from the gradients or parameters of more than one leaf, such as a norm over one bucket."""
    leaves: list[frozenset[int]] = [frozenset()] * len(flat.avals)
    for k, value in enumerate(flat.inputs[: 2 * num]):
        leaves[value] = frozenset((k % num,))
    for eqn in flat.eqns:
        joined = frozenset[int]().union(*(leaves[a] for a in eqn.reads()))
        for o in eqn.outputs:
            leaves[o] = joined if len(joined) < 2 else frozenset(sorted(joined)[:2])
    outputs = (o for eqn in flat.eqns if _is_scalar(flat, eqn) for o in eqn.outputs)
    return frozenset(o for o in outputs if len(leaves[o]) > 1)


def _mixed_late(flat: Flat, owner: Sequence[int | None]) -> tuple[int | None, ...]:
    """Single numbers of a bucket that only mixing equations read are computed by these too, from what they derive from.

    So a running sum over buckets starts nowhere in particular, and groups with equal parameters run equal programs.
    """
    late = list(owner)
    readers: dict[int, list[int]] = {}
    for index, eqn in enumerate(flat.eqns):
        for a in eqn.reads():
            readers.setdefault(a, []).append(index)
    outputs = {a for a in flat.outputs if isinstance(a, int)}
    for eqn in reversed(flat.eqns):
        scalar = all(flat.avals[v].size == 1 for v in (*eqn.outputs, *eqn.reads()))
        mixed = all(
            o not in outputs and o in readers and all(late[flat.eqns[i].outputs[0]] == MIXED for i in readers[o])
            for o in eqn.outputs
        )
        if scalar and mixed and any(late[o] is not None for o in eqn.outputs):
            for o in eqn.outputs:
                late[o] = MIXED
    return tuple(late)


def _exchanges(flat: Flat, owner: Sequence[int | None]) -> tuple[tuple[int, ...], ...]:
    rounds = [0] * len(flat.avals)
    exchanged: dict[int, dict[int, None]] = {}
    for eqn in flat.eqns:
        mixed = any(owner[o] == MIXED for o in eqn.outputs)
        now = 0
        for a in eqn.reads():
            crosses = mixed and owner[a] not in (None, MIXED)
            now = max(now, rounds[a] + crosses)
            if crosses:
                exchanged.setdefault(rounds[a], {})[a] = None
                if nbytes(flat.avals[a]) > MAX_EXCHANGED_BYTES:
                    aval = flat.avals[a]
                    raise TraceError(
                        f"optimizer: `{eqn.name}` mixes arrays of several parameters, {aval.dtype}{list(aval.shape)}.",
                        help="only scalars (norms, finite checks) may mix parameters; update each on its own.",
                    )
        for o in eqn.outputs:
            rounds[o] = now
    return tuple(tuple(exchanged.get(k, ())) for k in range(max(exchanged, default=-1) + 1))
