"""The loss function as one flat program with named inputs and outputs, traced at a given batch size."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from piper_jax.errors import TraceError
from piper_jax.tracing.annotations import _Reduction, loss_parts
from piper_jax.tracing.batch_layout import BatchLayout
from piper_jax.tracing.carried_state import Change, changes, taken_out, with_meaning
from piper_jax.tracing.constraints import under_a_mesh
from piper_jax.tracing.flat import Atom, Flat, flatten
from piper_jax.tracing.layers import with_layers
from piper_jax.tracing.loss_function import call_loss, place_of, require_output, require_scalar
from piper_jax.tracing.loss_terms import split_terms
from piper_jax.tracing.model_state import ModelState, path_text
from piper_jax.tracing.opening import opened

TermKind = Literal["loss", "total", "extra"]
MetricKind = Literal["mean", "sum", "last", "samples"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One auxiliary output: its path, its value in the flat program, and how slices are combined (``explicit``: as the
    user said)."""

    path: str
    atom: Atom
    kind: MetricKind
    dtype: Any
    explicit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LossProgram:
    """The loss function at one batch size. Inputs are the state leaves, the batch leaves, then one random key.

    Attributes:
      terms: scalars, with the kind of mean that each takes part in; the loss is their sum.
      weight: for a WeightedLoss, the scalar that depends on the batch only.
      carried: the state leaves that it changes.
      axis_names: names of dimensions of the state, which its sharding constraints may use.
      param_dependent, data_dependent, active: for each value, whether it depends on state, on batch or key, and
        differentiably on a trainable leaf.
      shared: what was built of its chunks so far, for others that are alike.
    """

    flat: Flat
    num_state: int
    num_batch: int
    terms: tuple[tuple[TermKind, Atom], ...]
    weight: Atom | None
    metrics: tuple[Metric, ...]
    metrics_tree: Any
    carried: tuple[Change, ...]
    axis_names: tuple[str, ...]
    param_dependent: tuple[bool, ...]
    data_dependent: tuple[bool, ...]
    active: tuple[bool, ...]
    shared: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def state_input(self, leaf: int) -> int:
        return self.flat.inputs[leaf]

    def batch_input(self, leaf: int) -> int:
        return self.flat.inputs[self.num_state + leaf]

    @property
    def in_turn(self) -> frozenset[int]:
        """State leaves of which each microbatch sees what the one before it left."""
        return frozenset(c.leaf for c in self.carried if c.carry in ("sequential", "equal"))

    def differs_by_slice(self) -> tuple[bool, ...]:
        """For each value, whether slices have it apart: by the batch, by the key or by state that they hand on."""
        handed_on = (self.state_input(leaf) for leaf in self.in_turn)
        return _dependent(self.flat, [*self.flat.inputs[self.num_state :], *handed_on])

    @property
    def weight_leaves(self) -> tuple[int, ...]:
        """The leaves of the batch that give the weight of a WeightedLoss."""
        wanted = [self.weight] if isinstance(self.weight, int) else []
        read = {a for i in self.flat.needed(wanted) for a in self.flat.eqns[i].reads()}.union(wanted)
        return tuple(i for i in range(self.num_batch) if self.batch_input(i) in read)

    @property
    def key_input(self) -> int:
        return self.flat.inputs[-1]


def key_spec() -> jax.ShapeDtypeStruct:
    """Shape and dtype of a random key."""
    return jax.eval_shape(lambda: jax.random.key(0))


def trace_loss(
    loss_fn: Callable[..., Any], state: ModelState, batch: BatchLayout, size: int, *, forward_only: bool = False
) -> LossProgram:
    """Traces the loss function for a batch of ``size`` rows.

    Args:
      forward_only: accept any outputs, all of them metrics (for ``predict``).

    Raises:
      TraceError: the loss is not a scalar, the weight depends on parameters, or state changes in a way that has no
        meaning over slices.
    """
    traced = _traced(loss_fn, state.undivided, batch, size, forward_only)
    return _program(*traced, state, len(batch.specs), forward_only)


def trace_layers(
    loss_fn: Callable[..., Any], state: ModelState, batch: BatchLayout, *, forward_only: bool = False
) -> tuple[ModelState, LossProgram]:
    """As ``trace_loss``, at the size of the batch, and the state with a leaf for each layer that a loop runs over."""
    flat, names = _traced(loss_fn, state, batch, batch.size, forward_only)
    state = with_layers(state, flat, len(batch.specs))
    return state, _program(flat, names, state, len(batch.specs), forward_only)


def _traced(
    loss_fn: Callable[..., Any], state: ModelState, batch: BatchLayout, size: int, forward_only: bool
) -> tuple[Flat, dict[str, Any]]:
    names: dict[str, Any] = {"place": place_of(loss_fn)}

    def run(state_values: Sequence[Any], batch_values: Sequence[Any], key: Any) -> list[Any]:
        result, built = call_loss(loss_fn, state, state_values, batch.build(batch_values), key)
        parts, aux = ({}, result) if forward_only else loss_parts(result)
        aux, given = taken_out(aux, state)
        names["given"] = [(leaf, carry) for leaf, _, carry in given]
        for name, value in parts.items():
            require_scalar(names["place"], name, value)
        leaves, tree = jax.tree_util.tree_flatten_with_path(_reduced_leaves(aux), is_leaf=_is_reduction)
        names.update(parts=tuple(parts), tree=tree, paths=[path_text(p) for p, _ in leaves])
        names["kinds"] = [v.kind if isinstance(v, _Reduction) else "" for _, v in leaves]
        metrics = [v.value if isinstance(v, _Reduction) else v for _, v in leaves]
        for path, value in zip(names["paths"], metrics, strict=True):
            require_output(names["place"], path, value)
        return [*parts.values(), *metrics, *(jnp.asarray(v) for _, v, _ in given), *state.mutated(built)]

    specs = [jax.ShapeDtypeStruct(leaf.shape, _dtype(leaf.dtype)) for leaf in state.leaves]
    made = under_a_mesh(lambda: jax.make_jaxpr(run)(specs, batch.specs_at(size), key_spec()), state.axis_names)
    return flatten(made), names


def _opened(flat: Flat, state: ModelState, names: Mapping[str, Any]) -> Flat:
    """The program with layers apart, as the state has them."""
    divisions = state.leaf_divisions
    inputs = (*divisions, *[None] * (len(flat.inputs) - len(divisions)))
    outputs = [None] * (len(names["parts"]) + len(names["paths"])) + [divisions[leaf] for leaf, _ in names["given"]]
    return opened(flat, inputs, [*outputs, *(divisions if len(flat.outputs) > len(outputs) else ())])


def _is_reduction(value: Any) -> bool:
    return isinstance(value, _Reduction)


def _reduced_leaves(aux: Any) -> Any:
    """``Sum({"a": x, "b": y})`` --> ``{"a": Sum(x), "b": Sum(y)}``."""

    def spread(value: Any) -> Any:
        return jax.tree.map(type(value), value.value) if _is_reduction(value) else value

    return jax.tree.map(spread, aux, is_leaf=_is_reduction)


def _dtype(name: str) -> Any:
    return key_spec().dtype if name.startswith("key<") else np.dtype(name) if name != "bfloat16" else jnp.bfloat16


def _program(
    flat: Flat, names: Mapping[str, Any], state: ModelState, num_batch: int, forward_only: bool
) -> LossProgram:
    num_outputs, flat = len(names["parts"]) + len(names["paths"]), _opened(flat, state, names)
    given = [(piece, carry) for leaf, carry in names["given"] for piece in state.pieces[leaf]]
    changed = () if forward_only else changes(flat, state, given, num_outputs)
    flat = replace(flat, outputs=flat.outputs[:num_outputs])
    state = state.carrying({change.leaf: change.carry for change in changed})
    num_parts = len(names["parts"])
    parts = dict(zip(names["parts"], flat.outputs[:num_parts], strict=True))
    aux = flat.outputs[num_parts:]
    random = {*state.rng_keys, *state.rng_counts}
    params = [v for i, v in enumerate(flat.inputs[: len(state.leaves)]) if i not in random]
    data = [v for v in flat.inputs if v not in set(params)]
    param_free = [not d for d in _dependent(flat, params)]
    weight = parts.pop("weight", None)
    if isinstance(weight, int) and not param_free[weight]:
        raise TraceError(
            f"trace: the WeightedLoss.weight of {names['place']} depends on parameters.",
            help="compute it from the batch alone, for example from the padding mask.",
        )
    if isinstance(weight, int) and _dependent(flat, [flat.inputs[i] for i in random])[weight]:
        raise TraceError(
            f"trace: the WeightedLoss.weight of {names['place']} depends on the random streams of the model.",
            help="draw what it depends on from the key of the slice: loss_fn(model, batch, rng).",
        )
    terms: list[tuple[TermKind, Atom]] = []
    for kind, root in parts.items():
        flat, atoms = split_terms(flat, root, param_free)
        param_free += [not d for d in _dependent(flat, params)][len(param_free) :]
        terms.extend((kind, atom) for atom in atoms)
    weights = [weight] if weight is not None else []
    carried = with_meaning(flat, state, changed, _apart(flat, data, changed))
    wanted = (*(a for _, a in terms), *weights, *aux, *(change.atom for change in carried))
    flat = replace(flat, outputs=wanted).without_dead_code()
    metrics = tuple(
        Metric(path=path, atom=atom, kind=kind or "mean", dtype=_atom_aval(flat, atom).dtype, explicit=bool(kind))
        for path, atom, kind in zip(names["paths"], aux, names["kinds"], strict=True)
    )
    trainable = [flat.inputs[i] for i in state.trainable]
    return LossProgram(
        flat=flat,
        num_state=len(state.leaves),
        num_batch=num_batch,
        terms=tuple(terms),
        weight=weight,
        metrics=_inferred(flat, metrics, names["kinds"]),
        metrics_tree=names["tree"],
        carried=tuple(carried),
        axis_names=state.axis_names,
        param_dependent=_dependent(flat, params),
        data_dependent=_dependent(flat, data),
        active=_dependent(flat, trainable, differentiable=True),
    )


def _apart(flat: Flat, data: Sequence[int], changed: Sequence[Change]) -> tuple[bool, ...]:
    """For each value, whether replicas have it apart: by ``data``, or by state that ``data`` changed in turn."""
    state: set[int] = set()
    while True:
        found = _dependent(flat, [*data, *state])
        turn = [c for c in changed if c.carry == "sequential" and isinstance(c.atom, int) and found[c.atom]]
        if state.issuperset(own := {flat.inputs[c.leaf] for c in turn}):
            return found
        state |= own


def _atom_aval(flat: Flat, atom: Atom) -> Any:
    return flat.avals[atom] if isinstance(atom, int) else atom.aval


def _inferred(flat: Flat, metrics: Sequence[Metric], kinds: Sequence[str]) -> tuple[Metric, ...]:
    """Without an explicit reduction: floats are averaged, integers and booleans summed."""
    return tuple(
        m if kind or jnp.issubdtype(m.dtype, jnp.inexact) else replace(m, kind="sum")
        for m, kind in zip(metrics, kinds, strict=True)
    )


def _dependent(flat: Flat, roots: Sequence[int], *, differentiable: bool = False) -> tuple[bool, ...]:
    """For each value, whether it depends on ``roots`` (through floating-point values only, if ``differentiable``)."""
    found = [False] * len(flat.avals)
    for root in roots:
        found[root] = True
    for eqn in flat.eqns:
        if any(found[a] for a in eqn.reads()) and not (differentiable and eqn.name == "stop_gradient"):
            for o in eqn.outputs:
                found[o] = not differentiable or jnp.issubdtype(flat.avals[o].dtype, jnp.inexact)
    return tuple(found)
