"""State that the loss function changes: what each slice leaves for the next microbatch or the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from piper_jax.arguments import shown
from piper_jax.errors import AnnotationError, TraceError, nearest, suggest
from piper_jax.ir.nodes import Carry
from piper_jax.tracing.flat import Atom, Flat
from piper_jax.tracing.model_state import ModelState, path_text

Declared = Literal["sequential", "sum", "mean"]
POLICIES: tuple[Declared, ...] = get_args(Declared)
FROZEN = "freeze it (use_running_average=True)"


class Carried:
    """The next value of a part of the parameters, among the auxiliary outputs of a loss function.

    For pytrees, such as Linen's collections; the variables of an ``nnx.Module`` are carried as they are assigned, by
    the ``carry`` of each: ``nnx.BatchStat(x, carry="mean")``. Leaves that are carried are not trained. ::

        y, updated = model.apply(variables, x, mutable=["batch_stats"])
        return loss(y), {"accuracy": accuracy, "state": piper.Carried(updated)}

    Args:
      value: a pytree with the paths, shapes and dtypes of the leaves that it takes the place of.
      carry: ``"sequential"``: each microbatch sees what the one before it left; replicas, each of which sees its own
        rows, are averaged at the end of a step. ``"sum"``, ``"mean"``: every slice sees the value of the step's start,
        and the next one is the sum or the mean of what all slices left.

    Raises:
      AnnotationError: another ``carry``.
    """

    def __init__(self, value: Any, carry: Declared = "sequential"):
        self.value, self.carry = value, declared(carry, "Carried")


jax.tree_util.register_pytree_node(Carried, lambda c: ((c.value,), c.carry), lambda carry, v: Carried(v[0], carry))


def declared(carry: Any, where: str) -> Declared:
    """A policy that a user wrote.

    Raises:
      AnnotationError: it is none.
    """
    if carry not in POLICIES:
        raise AnnotationError(f"{where}: carry={shown(carry)}", help=suggest(str(carry), POLICIES))
    return carry


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A state leaf that the loss function changes, its next value in the flat program, and how it is carried."""

    leaf: int
    atom: Atom
    carry: Carry


def taken_out(aux: Any, state: ModelState) -> tuple[Any, list[tuple[int, Any, Declared]]]:
    """The auxiliary outputs without what is carried, and for each carried leaf its index, next value and policy."""
    found: list[tuple[int, Any, Declared]] = []
    index = {leaf.path: i for i, leaf in enumerate(state.leaves)}

    def take(value: Any) -> Any:
        if not isinstance(value, Carried):
            return value
        for path, leaf in jax.tree_util.tree_leaves_with_path(value.value):
            name = path_text(path)
            if name not in index or state.rng_keys or state.rng_counts:
                raise TraceError(
                    f"trace: the loss function carries {name or 'a value'}, which is no leaf of the parameters.",
                    help=nearest(name, index) if index else "Carried takes a part of the parameters, by path.",
                )
            found.append((index[name], leaf, value.carry))
        return None

    others = jax.tree.map(take, aux, is_leaf=lambda value: isinstance(value, Carried))
    if isinstance(aux, dict):
        others = {name: others[name] for name, value in aux.items() if not isinstance(value, Carried)}
    return others, found


def left(aux: Any, after: Sequence[Any], before: Sequence[Any], state: ModelState) -> dict[int, tuple[Any, Declared]]:
    """What one slice leaves of each leaf that it changes, and the policy; for evaluation without a plan.

    Args:
      aux: auxiliary outputs of the loss function.
      before, after: all leaves of the state, as the loss function got and, if it has a state of its own, left them.
    """
    found = {leaf: (value, carry) for leaf, value, carry in taken_out(aux, state)[1]}
    fixed = {*state.rng_keys, *state.rng_counts, *(state.trainable if after else ())}
    for leaf, (value, old) in enumerate(zip(after, before, strict=False)):
        if value is not old and leaf not in fixed:
            found[leaf] = value, declared(state.carries.get(leaf, "sequential"), state.leaves[leaf].path)
    return found


def changes(
    flat: Flat, state: ModelState, given: Sequence[tuple[int, Declared]], num_outputs: int
) -> tuple[Change, ...]:
    """The leaves whose last value is another than their first.

    Args:
      given: leaf and policy of the outputs after the first ``num_outputs``; the whole state after the loss function
        follows them, if it has one.

    Raises:
      TraceError: state is added, a parameter changes, or a change has no meaning over slices.
    """
    after = flat.outputs[num_outputs + len(given) :]
    if after and len(after) != len(state.leaves):
        raise TraceError(
            f"trace: the loss function adds state to the model ({len(after)} arrays, {len(state.leaves)} before).",
            help="return what nnx sow and the like collect as an auxiliary output instead.",
        )
    found: dict[int, tuple[Atom, Declared]] = {}
    for (leaf, carry), atom in zip(given, flat.outputs[num_outputs:], strict=False):
        found[leaf] = atom, carry
    random = {*state.rng_keys, *state.rng_counts}
    for leaf, atom in enumerate(after):
        if atom != flat.inputs[leaf] and leaf not in random:
            if state.leaves[leaf].kind == "trainable":
                raise TraceError(
                    f"trace: {state.leaves[leaf].path} is trained, and changes inside the loss function.",
                    help="let the optimizer alone change parameters, or make it another nnx.Variable (wrt=...).",
                )
            found[leaf] = atom, declared(state.carries.get(leaf, "sequential"), state.leaves[leaf].path)
    for layers in state.pieces:  # all layers of a stack or none, as the user sees one leaf
        if any(leaf in found for leaf in layers):
            carry = next(found[leaf][1] for leaf in layers if leaf in found)
            found |= {leaf: (flat.inputs[leaf], carry) for leaf in layers if leaf not in found}
    return tuple(Change(leaf=leaf, atom=atom, carry=carry) for leaf, (atom, carry) in sorted(found.items()))


def with_meaning(flat: Flat, state: ModelState, found: Sequence[Change], on_data: Sequence[bool]) -> list[Change]:
    """The changes, where each can be reduced over slices.

    Args:
      on_data: for each value, whether it depends on the batch or on random keys, also by other state.
    """
    return [_with_meaning(state, change, isinstance(a := change.atom, int) and on_data[a], flat) for change in found]


def _with_meaning(state: ModelState, change: Change, on_data: bool, flat: Flat) -> Change:
    leaf = state.leaves[change.leaf]
    aval = flat.avals[change.atom] if isinstance(change.atom, int) else change.atom.aval
    if (tuple(aval.shape), str(aval.dtype)) != (leaf.shape, leaf.dtype):
        raise TraceError(
            f"trace: {leaf.path} is {leaf.dtype}{list(leaf.shape)}, and becomes {aval.dtype}{list(aval.shape)}.",
            help="state keeps its shape and dtype from step to step.",
        )
    if leaf.dtype.startswith("key<"):
        raise TraceError(
            f"trace: {leaf.path}, a random key, changes inside the loss function.",
            help="take the key of the slice: loss_fn(model, batch, rng), or use nnx.Rngs.",
        )
    if change.carry == "sequential" and not on_data:
        return Change(leaf=change.leaf, atom=change.atom, carry="equal")
    is_float = jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.inexact)
    if (is_float or change.carry == "sum") and leaf.dtype != "bool":
        return change
    if not on_data:
        raise TraceError(
            f'trace: {leaf.path} is {leaf.dtype}, which has no carry="{change.carry}", and no batch changes it.',
            help='carry="sequential", the default, hands it on from microbatch to microbatch.',
        )
    whole = "make it an integer: " if leaf.dtype == "bool" else ""
    raise TraceError(
        f"trace: {leaf.path} is {leaf.dtype} and depends on the batch, so replicas leave different values.",
        help=f'{whole}carry="sum" adds up what all slices leave; or {FROZEN}.',
    )
