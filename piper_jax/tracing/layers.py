"""Finds the stacks of layers that loops run over, and divides the model's state at their layers.

A leaf ``layers.kernel [12, 64, 64]`` becomes the leaves ``layers.0.kernel`` to ``layers.11.kernel``, each
``[1, 64, 64]``: where a list of layers would have its number. What the user passes and gets keeps its stacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, starmap
from typing import Any

from piper_jax import _jax_compat
from piper_jax.ir.nodes import Layered, Leaf
from piper_jax.tracing.flat import Flat, flatten
from piper_jax.tracing.model_state import ModelState
from piper_jax.tracing.pieces import Division, join_all, piecewise, split_all

View = Mapping[tuple[int, int], int]
"""(leaf, its dimension) -> the dimension of a value that is this one, untouched."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Leaves that one loop runs over, each with its division; ``beside`` are those that stay as they are."""

    leaves: Mapping[int, Division]
    beside: frozenset[int]


def with_layers(state: ModelState, flat: Flat, num_batch: int) -> ModelState:
    """The state with a leaf for each layer of a stack; the same state if no loop of the loss runs over layers.

    Args:
      flat: the loss as traced; its inputs are the leaves of ``state``, ``num_batch`` batch leaves and a key.
    """
    stacks = stacks_of_layers(flat, len(state.leaves), num_batch, {*state.rng_keys, *state.rng_counts})
    return _divided(state, stacks) if stacks else state


def stacks_of_layers(flat: Flat, num_state: int, num_batch: int, apart: set[int]) -> list[Stack]:
    """The stacks that scans of the loss run over while they carry something of the batch.

    Loops over time are none: what they run over depends on the batch. Nor are those over tables without activations.

    Args:
      apart: state leaves that are never divided.
    """
    search = _Search(set(), apart, [])
    views: dict[int, View] = {}
    for leaf, value in enumerate(flat.inputs[:num_state]):
        views[value] = {(leaf, d): d for d in range(len(flat.avals[value].shape))}
    search.visit(flat, views, {*flat.inputs[num_state : num_state + num_batch]})
    return search.stacks


@dataclass(frozen=True, slots=True)
class _Search:
    known: set[int]
    apart: set[int]
    stacks: list[Stack]

    def visit(self, flat: Flat, views: dict[int, View], batch: set[int]) -> None:
        """Follows the leaves through a program; ``batch`` are the values that depend on the batch."""
        for eqn in flat.eqns:
            from_batch = [isinstance(a, int) and a in batch for a in eqn.inputs]
            seen = [views.get(a, {}) if isinstance(a, int) else {} for a in eqn.inputs]
            if eqn.name == "scan" and (parts := _jax_compat.scan_parts(eqn.eqn)) is not None:
                first = parts.num_consts + parts.num_carry
                if any(from_batch[:first]) and not any(from_batch[first:]):
                    self.add(seen[first:], parts.length)
            elif (inner := _jax_compat.inner_jaxpr(eqn.eqn, remat=True)) is not None and any(seen):
                body = flatten(inner)
                given = {v: view for v, view in zip(body.inputs, seen, strict=True) if view}
                self.visit(body, given, {v for v, own in zip(body.inputs, from_batch, strict=True) if own})
            elif any(seen):
                views[eqn.outputs[0]] = _through(eqn.eqn, seen)
            if any(from_batch):
                batch.update(eqn.outputs)

    def add(self, stacks: Sequence[View], length: int) -> None:
        found = {leaf: Division(own, length) for view in stacks for (leaf, own), dim in view.items() if dim == 0}
        new = {leaf: d for leaf, d in found.items() if leaf not in self.known | self.apart}
        if new:
            self.known.update(new)
            self.stacks.append(Stack(new, frozenset(found.keys() - new.keys())))


def _through(eqn: Any, seen: Sequence[View]) -> View:
    """The dimensions of leaves that an equation leaves untouched."""
    out: dict[tuple[int, int], int] = {}
    for position, view in enumerate(seen):
        for key, dim in view.items():
            found = piecewise(eqn, [dim if k == position else None for k in range(len(seen))])
            if found is not None:
                out[key] = found.out
    return out


def _divided(whole: ModelState, stacks: Sequence[Stack]) -> ModelState:
    divisions: list[Division | None] = [None] * len(whole.leaves)
    names: list[tuple[str, ...]] = [(leaf.path,) for leaf in whole.leaves]
    paths = [leaf.path for leaf in whole.leaves]
    places = [_place_of_number(paths, {*stack.leaves, *stack.beside}) for stack in stacks]
    for stack, place in zip(stacks, places, strict=True):
        alone = places.count(place) == 1
        for i, division in stack.leaves.items():
            divisions[i] = division
            words = whole.leaves[i].path.split(".")
            at = len(place) if alone else len(words)
            names[i] = tuple(".".join((*words[:at], str(k), *words[at:])) for k in range(division.count))
    first = [0]
    for own in names:
        first.append(first[-1] + len(own))
    pairs = zip(whole.leaves, divisions, names, strict=True)
    return ModelState(
        leaves=tuple(made for leaf, division, own in pairs for made in _pieces(leaf, division, own)),
        rng_keys=tuple(first[i] for i in whole.rng_keys),
        rng_counts=tuple(first[i] for i in whole.rng_counts),
        build=lambda values: whole.build(join_all(values, divisions)),
        mutated=lambda built: split_all(whole.mutated(built), divisions),
        values=lambda params: split_all(whole.values(params), divisions),
        skeleton=lambda chosen: whole.skeleton(
            {
                i: join_all([chosen[k] for k in own], [divisions[i]])[0]
                for i, own in enumerate(starmap(range, pairwise(first)))
                if own[0] in chosen
            }
        ),
        carries={k: carry for i, carry in whole.carries.items() for k in range(first[i], first[i + 1])},
        whole=whole,
        divisions=tuple(divisions),
    )


def _place_of_number(paths: Sequence[str], stack: set[int]) -> tuple[str, ...]:
    """The module that holds a stack and nothing else: the number of the layer follows it."""
    shared: list[str] = []
    for words in zip(*(paths[i].split(".") for i in stack), strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
        others = (path.split(".") for i, path in enumerate(paths) if i not in stack)
        if words[0] != "params" and not any(other[: len(shared)] == shared for other in others):
            break
    return tuple(shared)


def _pieces(leaf: Leaf, division: Division | None, names: Sequence[str]) -> list[Leaf]:
    if division is None:
        return [leaf]
    shape = division.piece_shape(leaf.shape)
    known = division.piece_shape(leaf.axis_names) if leaf.axis_names else ()
    nbytes = leaf.nbytes // division.count
    whole = Layered(path=leaf.path, dim=division.dim, count=division.count)
    return [replace(leaf, path=name, shape=shape, nbytes=nbytes, axis_names=known, layered=whole) for name in names]
