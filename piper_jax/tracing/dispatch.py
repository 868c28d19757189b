"""How the arrays of an expert region lie on the devices that hold its experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.errors import PlanError
from piper_jax.tracing.chunk import Chunk
from piper_jax.tracing.flat import Flat
from piper_jax.tracing.local_experts import LocalExperts, Part
from piper_jax.tracing.loss_program import LossProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """The experts of one operation divided over ``num_parts`` devices; each of them also has tokens of its own.

    With places for each expert, arrays are ``[experts, places, ...]`` on the device of the tokens and
    ``[local experts, sources, places, ...]`` on that of the experts: each source's is evaluated as its own. Rows of
    any number for each expert (``bound`` is given) are ``[rows, ...]``, sorted by expert, with ``sizes [experts]``;
    they become ``[sources * bound, ...]``, sorted by local expert whatever their source, and ``[sources, local]``.

    Attributes:
      bound: how many rows of one source go to one device at most.  rows: how many a source has.
    """

    place: str
    num_experts: int
    num_parts: int
    bound: int | None = None
    rows: int = 0

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_parts

    def is_sizes(self, aval: Any) -> bool:
        """Whether an array says how many rows are of each expert."""
        return self.bound is not None and aval.shape == (self.num_experts,) and jnp.issubdtype(aval.dtype, jnp.integer)

    def arrived(self, aval: Any) -> jax.ShapeDtypeStruct:
        """Shape and dtype, on the device of the experts, of an array that enters or leaves."""
        rest = tuple(aval.shape[1:])
        if self.is_sizes(aval):
            shape = (self.num_parts, self.num_local)
        elif self.bound is not None:
            shape = (self.num_parts * self.bound, *rest)
        else:
            shape = (self.num_local, self.num_parts, *rest)
        return jax.ShapeDtypeStruct(shape, aval.dtype)

    def state(self, aval: Any) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the part of a parameter that a device holds."""
        return jax.ShapeDtypeStruct((self.num_local, *aval.shape[1:]), aval.dtype)

    def evaluate(
        self, flat: Flat, chunk: Chunk, state: Mapping[int, Any], entered: Mapping[int, Any]
    ) -> dict[int, Any]:
        """The values that leave the region.

        Args:
          state: parameters by value, this device's experts alone.  entered: by value, as ``arrived`` says.
        """
        experts = Part(0, self.num_experts, self.num_local)
        parts = dict.fromkeys(state, experts)
        eqns = [flat.eqns[i] for i in chunk.eqns]

        def run(arrays: Mapping[int, Any]) -> dict[int, Any]:
            env = {**flat.consts, **state, **arrays}
            region = LocalExperts.of(self.place, flat, {**parts, **{v: self._part(flat.avals[v]) for v in arrays}})
            region.run(eqns, env)
            for v in chunk.exports:
                if region.parts.get(v) != self._part(flat.avals[v]):
                    raise PlanError(
                        f"compile: what leaves the experts of {self.place} does not have them on dimension 0.",
                        help="return dispatched tensors, [experts, capacity, ...], from the expert region.",
                    )
            return {v: env[v] for v in chunk.exports}

        if self.bound is not None:
            sizes = {v: a.sum(0) for v, a in entered.items() if self.is_sizes(flat.avals[v])}
            return run({**entered, **sizes})
        return jax.vmap(run, in_axes=(dict.fromkeys(entered, 1),), out_axes=1)(dict(entered))

    def _part(self, aval: Any) -> Part:
        if self.bound is None or self.is_sizes(aval):
            return Part(0, self.num_experts, self.num_local)
        return Part(0, aval.shape[0], self.num_parts * self.bound, rows=True)


def dispatch(program: LossProgram, chunk: Chunk, place: str, num_parts: int, bound: float | None) -> Dispatch:
    """How the region ``chunk`` of a program at the shape of one slice is divided over ``num_parts`` devices.

    Args:
      bound: for rows, how many of them one device takes of a slice, as a multiple of an equal share.

    Raises:
      PlanError: what the region reads or gives has no experts on dimension 0, or they do not divide.
    """
    avals = program.flat.avals
    values = {v: avals[v] for v in (*chunk.externals, *chunk.exports)}
    state = [avals[program.state_input(i)] for i in chunk.state]
    first = next(iter(values.values()), None) if bound is None else _sizes(program, chunk, place)
    if first is None or not first.shape or chunk.terms or chunk.metrics or (chunk.batch or chunk.uses_key):
        raise PlanError(
            f"compile: {place} cannot be sharded: its region has other inputs and outputs than dispatched tensors.",
            help="take and return [experts, capacity, ...], or rows and sizes.",
        )
    num_experts = first.shape[0]
    if num_experts % num_parts:
        raise PlanError(
            f"compile: the {num_experts} experts of {place} do not divide over expert_parallel={num_parts}.",
            help=f"use a divisor of {num_experts}.",
        )
    rows = next((a.shape[0] for a in values.values() if a is not first and a.shape), 0)
    most = None if bound is None else max(1, min(rows, math.ceil(min(bound, num_parts) * rows / num_parts)))
    for aval in (*state, *(values.values() if bound is None else ())):
        if not aval.shape or aval.shape[0] != num_experts:
            raise PlanError(
                f"compile: {place} has {num_experts} experts, but reads or gives an array of shape {list(aval.shape)}.",
                help="every parameter and every tensor of an expert region has the experts on dimension 0.",
            )
    return Dispatch(place=place, num_experts=num_experts, num_parts=num_parts, bound=most, rows=rows)


def _sizes(program: LossProgram, chunk: Chunk, place: str) -> Any:
    """Of what enters a region of rows, how many rows are of each expert: the sizes of its ragged products."""
    flat = program.flat
    made = {o: eqn for eqn in (flat.eqns[i] for i in chunk.eqns) for o in eqn.outputs}
    vectors = [
        v for v in chunk.externals if len(flat.avals[v].shape) == 1 and jnp.issubdtype(flat.avals[v].dtype, jnp.integer)
    ]
    of_products: dict[int, None] = {}
    for eqn in (flat.eqns[i] for i in chunk.eqns if flat.eqns[i].name.startswith("ragged_dot")):
        value = eqn.inputs[2]
        while isinstance(value, int) and value in made and made[value].name == "convert_element_type":
            value = made[value].inputs[0]
        if value in vectors:
            of_products[value] = None  # type: ignore[index]
    found = list(of_products) or vectors
    if not found:
        raise PlanError(
            f"compile: no sizes that depend on the batch enter {place}, whose region takes rows.",
            help="pass the number of rows of each expert as an argument, or use places: [experts, capacity, ...].",
        )
    alike = [v for v in vectors if flat.avals[v].shape == flat.avals[found[0]].shape]
    if len(found) > 1 or len(alike) > 1:
        raise PlanError(
            f"compile: {len(alike)} vectors of integers that could be its sizes enter {place}.",
            help="pass sizes alone as a vector; give other integers a dimension more, [rows, 1].",
        )
    return flat.avals[found[0]]
