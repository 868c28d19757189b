"""Hand-built plans are completed, checked, ordered and printed as the text beside this file.

``PIPER_UPDATE_GOLDEN=1 pytest tests/golden`` writes the files anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hand_built_plans import HAND_BUILT
from traced_dags import chain, tied

import piper_jax as piper
from piper_jax.ir.decoding import dag_from_data
from piper_jax.ir.encoding import dag_data
from piper_jax.ir.text import dag_text
from piper_jax.planning import plan_from_json, plan_json


def strategies():
    """Named strategies on small models: (name of the file, plan)."""
    yield "1f1b_with_zero_1", chain(4).apply(piper.Strategy(pipeline_parallel=2, data_parallel=2, zero_stage=1))
    gpipe = piper.Strategy(pipeline_parallel=3, num_microbatches=2, directives=(piper.directive("GPipe"),))
    yield "gpipe_with_tied_state", tied(3).apply(gpipe)


PLANS = {build.__name__: build for build in HAND_BUILT} | {name: lambda plan=plan: plan for name, plan in strategies()}


def compare(name: str, text: str) -> None:
    path = Path(__file__).with_name(f"{name}.txt")
    if os.environ.get("PIPER_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; see the docstring of this file"


@pytest.mark.parametrize("name", list(PLANS))
def test_plan_is_checked_and_printed(name):
    plan = PLANS[name]().check()
    compare(name, f"{plan}\n\n{dag_text(plan.complete())}")


@pytest.mark.parametrize("name", list(PLANS))
def test_plan_survives_json_whole_and_completed(name):
    plan = PLANS[name]()
    again = plan_from_json(plan_json(plan))
    assert again == plan
    assert dag_text(again.complete()) == dag_text(plan.complete())
    assert dag_from_data(json.loads(json.dumps(dag_data(plan.complete())))) == plan.complete()
