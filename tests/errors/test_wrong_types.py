"""Every argument of the planning half of piper, given values of many types: no error of Python's own comes out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from expected import Expected
from traced_dags import chain, experts
from wrong import raw_errors

import piper_jax as piper
from piper_jax import Strategy, directive, where
from piper_jax.ir.nodes import DeviceGroup, Replication
from piper_jax.planning import StrategyOptions, find_strategy, load_strategies, plan_from_json, strategies
from piper_jax.simulation import HARDWARE, MeasuredCosts, RooflineCosts, UnitCosts

TRACED, EXPERTS = chain(4), experts(2)
PLACED = TRACED.cut(stages=2).split(where(), num_microbatches=2)
PLACED = PLACED.place(where(PP=0), group=0).place(where(PP=1), group=1)
PLAN = chain(8).apply(Strategy(pipeline_parallel=2))
REPORT = piper.simulate(PLAN)


def with_group(**fields):
    return TRACED.place(where(), group=DeviceGroup(**{"name": "g", "devices": (0, 1), **fields})).check()


def with_option(name, option):
    degrees = {"pipeline_parallel": 2, "data_parallel": 2, "num_microbatches": 4}
    return lambda x: chain(8).apply(Strategy(**degrees, directives=(directive(name, **{option: x}),))).check()


def with_field(item, name):
    return lambda x: piper.simulate(PLAN, hardware=dataclasses.replace(item, **{name: x}))


CALLS = {
    "cut stages": lambda x: TRACED.cut(stages=x),
    "split filter": lambda x: TRACED.split(x, num_microbatches=2),
    "split num_microbatches": lambda x: TRACED.split(where(), num_microbatches=x),
    "split coordinate": lambda x: TRACED.split(where(), num_microbatches=2, coordinate=x),
    "place group": lambda x: TRACED.place(where(), group=x),
    "place stream": lambda x: TRACED.place(where(), group=0, stream=x),
    "group name": lambda x: with_group(name=x),
    "group devices": lambda x: with_group(devices=x),
    "group axes": lambda x: with_group(axes=x),
    "group axis": lambda x: with_group(axes=((x, 2),)),
    "group extent": lambda x: with_group(axes=(("data", x),)),
    "shard axis": lambda x: EXPERTS.shard(where(EP=...), axis=x),
    "shard stream": lambda x: EXPERTS.shard(where(EP=...), stream=x),
    "remat policy": lambda x: TRACED.remat(where(), policy=x),
    "order slots": lambda x: PLACED.order(x),
    "order slot": lambda x: PLACED.order([x]),
    "order member": lambda x: PLACED.order([(where(MB=0, PASS="F"), x)]),
    "apply": lambda x: TRACED.apply(x),
    "replay": lambda x: TRACED.replay(x),
    "replay record": lambda x: TRACED.replay([x]),
    "check memory_limit": lambda x: PLAN.check(memory_limit=x),
    "save": lambda x: PLAN.save(x),
    "load_plan": lambda x: piper.load_plan(x),
    "plan_from_json": lambda x: plan_from_json(x),
    "simulate plan": lambda x: piper.simulate(x),
    "simulate hardware": lambda x: piper.simulate(PLAN, hardware=x),
    "simulate costs": lambda x: piper.simulate(PLAN, costs=x),
    "simulate seconds": lambda x: piper.simulate(PLAN, costs={("layers.0", "F"): x}, hardware="h100"),
    "simulate title": lambda x: str(piper.simulate(PLAN, title=x)),
    "draw subject": lambda x: piper.draw(x, "a.html"),
    "draw path": lambda x: piper.draw(REPORT, x),
    "draw measured": lambda x: piper.draw(REPORT, "a.json", measured=x),
    "draw select": lambda x: piper.draw(PLAN, "a.html", select=x),
    "directive": lambda x: TRACED.apply(Strategy(directives=(directive(x),))),
    "directives": lambda x: Strategy(directives=x),
    "a directive": lambda x: Strategy(directives=(x,)),
    "strategy without a name": lambda x: Strategy(x),
    "filter and": lambda x: where() & x,
    "filter or": lambda x: where() | x,
    "strategy phase": lambda x: piper.strategy("Wrong", phase=x),
    "strategy options": lambda x: piper.strategy("Wrong", options=x),
    "strategy meaning": lambda x: piper.strategy("Wrong", options={"a": x}),
    "find_strategy": lambda x: find_strategy(x),
    "load_strategies": lambda x: load_strategies(x),
    "measured seconds": lambda x: piper.simulate(PLAN, costs=MeasuredCosts(seconds=x)),
    "measured fallback": lambda x: piper.simulate(PLAN, costs=MeasuredCosts(fallback=x)),
    "measured processors": lambda x: piper.simulate(PLAN, costs=MeasuredCosts(fallback=UnitCosts(), num_processors=x)),
    "roofline hardware": lambda x: piper.simulate(PLAN, costs=RooflineCosts(hardware=x)),
    "roofline efficiency": lambda x: piper.simulate(PLAN, costs=RooflineCosts(hardware="h100", efficiency=x)),
    "group of a rank": lambda x: StrategyOptions(pipeline_parallel=2).group(x),
    "multiple_of": lambda x: StrategyOptions().require_microbatches(multiple_of=x, rule="rule"),
    **{f"where {name}": lambda x, n=name: where(**{n: x}) for name in ("path", "PASS", "PP", "EP", "MB")},
    **{f"unit {name}": lambda x, n=name: UnitCosts(**{n: x}) for name in ("F", "B", "BI", "BW")},
    **{f.name: lambda x, n=f.name: Strategy(**{n: x}) for f in dataclasses.fields(Strategy)},
    **{
        f"replicate {f.name}": lambda x, n=f.name: PLACED.replicate(where(), **{"shard_params": True, n: x}).check()
        for f in dataclasses.fields(Replication)
    },
    **{f"hardware {f.name}": with_field(HARDWARE["h100"], f.name) for f in dataclasses.fields(HARDWARE["h100"])},
    **{
        f"{name} {option}": with_option(name, option)
        for name, known in strategies().items()
        for option in known.options
        if known.file.startswith(str(Path(piper.__file__).parents[1]))
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_no_error_of_python_comes_out(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert raw_errors(CALLS[name]) == []


expected = Expected(__file__)


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: stages=2.5 is not int, Sequence[Sequence[int]] or Sequence[str].
    help: how many; or the units of each stage, [(0, 1), (2,)]; or paths, ["embed, layers.0", "layers.1-3"].
""",
)
def a_fraction_of_stages():
    TRACED.cut(stages=2.5)


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: stages[0][1]='b' is not int.
    help: how many; or the units of each stage, [(0, 1), (2,)]; or paths, ["embed, layers.0", "layers.1-3"].
""",
)
def the_innermost_part_is_named():
    TRACED.cut(stages=[(0, "b"), (2, 3)])


@expected(
    piper.ConfigError,
    """
    simulate: costs=3 is not str, CostModel, Mapping[NodeId or tuple[str, str], float] or None.
    help: "unit" (F=1, B=2, BI=1, BW=1, communication 0; the default without hardware), "roofline", any cost model, \
or a table of measured seconds by node or by (op, PASS).
""",
)
def a_number_for_costs():
    piper.simulate(PLAN, costs=3)


@expected(
    piper.ConfigError,
    """
    simulate: there is no argument 'cost'.
    help: did you mean 'costs'?
""",
)
def an_argument_that_does_not_exist():
    piper.simulate(PLAN, cost="unit")


@expected(
    piper.ConfigError,
    """
    draw: missing a required argument: 'path'.
    help: draw(subject, path, measured, select).
""",
)
def an_argument_that_is_missing():
    piper.draw(PLAN)


@expected(
    piper.DirectiveError,
    """
    replicate[4] at FILE.py:LINE: reduce_every=0 is not 'step', 'microbatch' or a number from 1.
    help: give 'step', 'microbatch' or a number from 1.
""",
)
def gradients_that_are_never_reduced():
    PLACED.replicate(where(), shard_grads=True, reduce_every=0)


@expected(
    piper.DirectiveError,
    """
    replicate[4] at FILE.py:LINE: shard_params=True includes shard_grads, but shard_grads=False.
    help: leave shard_grads out.
""",
)
def an_option_that_contradicts_another():
    PLACED.replicate(where(), shard_params=True, shard_grads=False)


@expected(
    piper.DirectiveError,
    """
    replicate[4] at FILE.py:LINE: gather_distance=2 means nothing, as parameters are not gathered here.
    help: gather_distance needs shard_params=True.
""",
)
def an_option_that_means_nothing():
    PLACED.replicate(where(), shard_grads=True, gather_distance=2)


@expected(
    piper.DirectiveError,
    """
    directive('ZeRO-1', communication_overlap='yes') at FILE.py:LINE: communication_overlap='yes' is not a choice.
    help: use False or True.
""",
)
def a_word_for_true():
    TRACED.apply(Strategy(data_parallel=2, directives=directive("ZeRO-1", communication_overlap="yes")))


@expected(
    piper.DirectiveError,
    """
    Strategy: '1F1B' is not a directive.
    help: write piper.directive('1F1B').
""",
)
def a_name_for_a_directive():
    Strategy(directives=("1F1B",))


@pytest.mark.parametrize("name", expected.cases)
def test_message(name):
    expected.check(name)


def test_a_single_directive_needs_no_tuple():
    assert Strategy(directives=directive("GPipe")) == Strategy(directives=(directive("GPipe"),))
