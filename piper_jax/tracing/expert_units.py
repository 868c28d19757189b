"""Expert regions as units of their own, so that an exchange of tokens can stand on each side.

A pipeline unit with experts becomes several, one after another::

    layers.0  -->  layers.0 | layers.0.mlp.experts | layers.0.combine
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piper_jax import _jax_compat
from piper_jax.errors import AnnotationError, TraceError
from piper_jax.tracing.flat import BOUND, THOUSANDTHS, Flat, RegionKey
from piper_jax.tracing.loss_program import LossProgram

Owners = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of the model: its pipeline coordinate, and the number of its expert region, if it is one.

    Attributes:
      depth: how many expert regions of the same PP lie before it on the longest path.
      bound: the ``row_bound`` of an expert region, if it has one.
    """

    PP: int
    depth: int = 0
    EP: int | None = None
    bound: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The units of a traced loss, in the order in which data flows through them.

    Attributes:
      of_eqn: the unit of each equation, None where it roams.
      places: of each unit.
    """

    of_eqn: Owners
    places: tuple[Unit, ...]


def divided_at_experts(program: LossProgram, stages: Owners) -> Units:
    """Cuts pipeline units at their expert regions.

    What enters a region comes from another device, so all of it is a value of another unit: equations of a region that
    depend on data are the region's, and those that give it a value without any parameter roam no more.

    Args:
      stages: the pipeline unit of every equation, None where it roams.

    Raises:
      AnnotationError: regions inside one another, or a region in several pipeline units.
      TraceError: a region that reads the batch or the random key itself.
    """
    flat = program.flat
    regions = {i: key for i, eqn in enumerate(flat.eqns) if (key := _region(eqn.regions, eqn.path)) is not None}
    home = _homes(flat, stages, regions)
    owner: dict[int, int] = {i: stage for i, stage in enumerate(stages) if stage is not None}
    inside: dict[int, RegionKey] = {}
    for i, key in regions.items():
        if key in home and (i in owner or any(program.data_dependent[a] for a in flat.eqns[i].reads())):
            owner[i], inside[i] = home[key], key
    _own_inputs(program, owner, inside)
    return _numbered(flat, owner, inside, _depths(flat, owner, inside))


def _region(keys: Sequence[RegionKey], path: str) -> RegionKey | None:
    experts = [key for key in keys if key.tag == "EP"]
    if len(experts) > 1:
        raise AnnotationError(
            f"an expert region inside another one, at {path}.", help="wrap the experts of a layer once."
        )
    return experts[0] if experts else None


def _homes(flat: Flat, stages: Owners, regions: Mapping[int, RegionKey]) -> dict[RegionKey, int]:
    """The pipeline unit of each region; a region without activations is none."""
    found: dict[RegionKey, int] = {}
    for i, key in regions.items():
        stage = stages[i]
        if stage is not None and found.setdefault(key, stage) != stage:
            raise AnnotationError(
                f"the expert region at {flat.eqns[i].path} lies in PP={found[key]} and PP={stage}.",
                help='put the whole region inside one annotate("PP").',
            )
    return found


def _own_inputs(program: LossProgram, owner: dict[int, int], inside: Mapping[int, RegionKey]) -> None:
    """Values of data alone that enter a region are computed before it, and nowhere else."""
    flat = program.flat
    producer = {o: i for i, eqn in enumerate(flat.eqns) for o in eqn.outputs}
    for i in inside:
        for value in flat.eqns[i].reads():
            source = producer.get(value)
            if source is None and program.data_dependent[value]:
                at = flat.eqns[i].path or _jax_compat.user_line(flat.eqns[i].eqn)
                raise TraceError(
                    f"trace: the expert region at {at} reads the batch or the random key directly.",
                    help="pass it what it reads as an argument, dispatched like the tokens.",
                )
            if source is not None and source not in owner and program.data_dependent[value]:
                owner[source] = owner[i]


def _depths(flat: Flat, owner: Mapping[int, int], inside: Mapping[int, RegionKey]) -> dict[int, int]:
    entering: dict[RegionKey, list[int]] = {}
    made = {o: i for i in owner for o in flat.eqns[i].outputs}
    for i, key in inside.items():
        entering.setdefault(key, []).extend(flat.eqns[i].reads())
    depth: dict[int, int] = {}

    def before(i: int, values: Sequence[int]) -> int:
        sources = (made[v] for v in values if v in made)
        known = (s for s in sources if owner[s] == owner[i] and s in depth and inside.get(s) != inside.get(i, i))
        return max((depth[s] + (s in inside) for s in known), default=0)

    of_region: dict[RegionKey, int] = {}
    for i in sorted(owner):
        if i in inside:
            depth[i] = of_region.setdefault(inside[i], before(i, entering[inside[i]]))
        else:
            depth[i] = before(i, list(flat.eqns[i].reads()))
    return depth


def _numbered(flat: Flat, owner: Mapping[int, int], inside: Mapping[int, RegionKey], depth: Mapping[int, int]) -> Units:
    first: dict[RegionKey, int] = {}
    for i, key in inside.items():
        first.setdefault(key, i)
    keys = {i: (owner[i], depth[i], first[inside[i]] if i in inside else -1) for i in owner}
    order = {key: unit for unit, key in enumerate(sorted(set(keys.values())))}
    places: list[Unit] = []
    for stage, level, region in order:
        experts = sum(place.EP is not None for place in places)
        is_expert = region >= 0
        places.append(
            Unit(stage, level, experts if is_expert else None, _bound(flat.eqns[region].regions) if is_expert else None)
        )
    of_eqn = tuple(order[keys[i]] if i in keys else None for i in range(len(flat.eqns)))
    return Units(of_eqn=of_eqn, places=tuple(places))


def _bound(keys: Sequence[RegionKey]) -> float | None:
    found = next((key.mark for key in keys if key.tag == BOUND), None)
    return None if found is None else found / THOUSANDTHS or math.inf
