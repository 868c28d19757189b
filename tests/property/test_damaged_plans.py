"""Files of plans in which something was changed: refused when loaded, or sound enough that nothing fails raw later."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
from collections.abc import Iterator

from traced_dags import chain, experts

import piper_jax as piper
from piper_jax import Strategy, where
from piper_jax.planning import Plan, plan_from_json, plan_json

CHANGES = ("drop", "twice", "swap", None, -1, 7, 2.5, "x", True, [], {}, [[]], {"a": 1})
ONE_IN = 25


def plans() -> tuple[Plan, ...]:
    by_hand = experts(1).split(where(), num_microbatches=2).place(where(), group=(0, 1)).remat(where("layers.0"))
    by_hand = by_hand.replicate(where(), shard_params=True)
    by_hand = by_hand.order([where(MB=(0,), PASS="F") | where(MB=1, PASS="F"), ~where(PASS="F") & where(PP=0)])
    return chain(3).apply(Strategy(pipeline_parallel=2, data_parallel=2, num_microbatches=2)), by_hand, chain(2)


def places(data: object, at: tuple = ()) -> Iterator[tuple]:
    """The paths of everything inside of ``data``."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield (*at, key)
        yield from places(value, (*at, key))


def changed(data: dict, place: tuple, change: object) -> dict:
    data = inside = copy.deepcopy(data)
    for key in place[:-1]:
        inside = inside[key]
    key = place[-1]
    if change == "drop":
        del inside[key]
    elif change == "twice" and isinstance(inside, list):
        inside.insert(key, inside[key])
    elif change == "swap" and isinstance(inside, list):
        inside[key], inside[key - 1] = inside[key - 1], inside[key]
    else:
        inside[key] = change
    return data


def used(plan: Plan) -> None:
    """What a user does with a plan, each on its own: the checker may refuse what the simulator can run."""
    for use in (str, Plan.check, lambda p: str(p.complete()), lambda p: str(piper.simulate(p, hardware="h100"))):
        with contextlib.suppress(piper.PiperError):
            use(plan)


def test_no_change_of_a_file_fails_raw():
    chosen, refusals = random.Random(0), []
    for plan in plans():
        data = json.loads(plan_json(plan))
        for place in places(data):
            for change in CHANGES:
                if chosen.randrange(ONE_IN):
                    continue
                try:
                    used(plan_from_json(json.dumps(changed(data, place, change))))
                except piper.PlanError as error:
                    refusals.append(error.what)
    assert len(refusals) > 300
    assert all(re.match("plan (is damaged: |is not a piper plan|has format version)", what) for what in refusals)
