"""Configurations that are right: YAML scalars, overrides, defaults, round trip, strategies."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from piper_jax.config import Config, config_text, load_config, load_config_text, planned_strategy
from piper_jax.config.text import parse_document, parse_value
from piper_jax.planning import directive

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
TWO_BY_FOUR = """
strategy:
  data_parallel: 2
  pipeline_parallel: 4
  directives: 1F1B
"""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-1.5E3", -1500.0),
        (".5", 0.5),
        ("1.", 1.0),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("10", 10),
        ("+3", 3),
        ("010", 10),
        ("0x10", 16),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2001-01-01", "2001-01-01"),
        ("1F1B", "1F1B"),
        ("'1e-4'", "1e-4"),
        ("[1, a, 2e3]", [1, "a", 2000.0]),
        ("{a: 1e3}", {"a": 1000.0}),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: object):
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


def test_places_are_lines_of_the_file():
    document = parse_document("train:\n  steps: 3\ndata:\n  paths:\n  - a\n  - b\n", "x.yaml")
    assert document.place(("train", "steps")) == "x.yaml:2"
    assert document.place(("data", "paths", 1)) == "x.yaml:6"
    assert document.place(("data", "missing")) == "x.yaml:3"


def test_an_empty_file_is_all_defaults():
    assert load_config_text("") == Config()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_loads_and_comes_back_from_its_text(path: Path):
    config = load_config(path)
    assert load_config_text(config_text(config)) == config
    assert planned_strategy(config).num_devices == config.devices.num_virtual


def test_overrides_win_over_the_file():
    config = load_config_text(
        TWO_BY_FOUR,
        [
            "optimizer.learning_rate=1e-4",
            "train.steps=7",
            "optimizer.clip_norm=null",
            "strategy.directives=[GPipe]",
            "model.arguments.num_layers=6",
            "data.paths=[a.txt, 'b c.txt']",
            "data.paths.0=z.txt",
        ],
    )
    assert config.optimizer.learning_rate == 1e-4
    assert config.train.steps == 7
    assert config.optimizer.clip_norm is None
    assert planned_strategy(config).directives == (directive("GPipe"),)
    assert config.model.arguments == {"num_layers": 6}
    assert config.data.paths == ("z.txt", "b c.txt")


def test_a_value_may_hold_an_equals_sign():
    assert load_config_text("", ["data.paths=a=b.txt"]).data.paths == ("a=b.txt",)


@pytest.mark.parametrize("written", ["1F1B", "[1F1B]", "[{name: 1F1B}]", "{name: 1F1B}", "[{name: 1F1B, options: {}}]"])
def test_directives_may_be_written_short(written: str):
    config = load_config_text("", [f"strategy.directives={written}"])
    assert planned_strategy(config).directives == (directive("1F1B"),)


def test_options_of_a_directive_are_its_other_keys():
    config = load_config_text("", ["strategy.directives=[{name: ZeRO-3, gather_distance: 2}]"])
    assert planned_strategy(config).directives == (directive("ZeRO-3", gather_distance=2),)


def test_strategies_of_your_own_are_found_in_files(tmp_path: Path):
    file = tmp_path / "my_schedule.py"
    file.write_text(
        "import piper_jax as piper\n\n\n@piper.strategy('OnlyHere', options={'depth': 'how far'})\n"
        "def only_here(plan, options):\n    return plan\n"
    )
    config = load_config_text("", [f"strategy.files=[{file}]", "strategy.directives=[{name: OnlyHere, depth: 3}]"])
    assert planned_strategy(config).directives == (directive("OnlyHere", depth=3),)


def test_keys_of_an_optimizer_have_its_own_defaults():
    assert load_config_text("optimizer: {name: lion}").optimizer.b2 == 0.99
    sgd = load_config_text("optimizer: {name: sgd, schedule: constant}").optimizer
    assert (sgd.momentum, sgd.b1, sgd.final_fraction) == (0.9, None, None)
    assert load_config_text(config_text(load_config_text("optimizer: {name: muon}"))).optimizer.name == "muon"


def test_a_profile_is_a_window_or_none():
    assert load_config_text("profile: false").profile is None
    assert load_config_text("", ["profile.steps=[3,5]"]).profile.steps == (3, 5)


def test_a_whole_number_is_a_number():
    assert load_config_text("optimizer: {weight_decay: 0}").optimizer.weight_decay == 0


def test_configurations_do_not_change():
    with pytest.raises(ValidationError):
        Config().train.steps = 3  # type: ignore[misc]


@settings(deadline=None)
@given(
    learning_rate=st.floats(min_value=1e-12, max_value=1e3),
    steps=st.integers(min_value=1, max_value=10**9),
    path=st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1),
)
def test_any_configuration_comes_back_from_its_text(learning_rate: float, steps: int, path: str):
    values = {"optimizer": {"learning_rate": learning_rate}, "train": {"steps": steps}, "data": {"paths": [path]}}
    config = Config.model_validate(values)
    assert load_config_text(config_text(config)) == config
