"""Targets of ``piper compile``: what they are called, and what is said where their compiler is missing."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from piper_jax.cli.main import app
from piper_jax.errors import ConfigError
from piper_jax.targets.profiles import PLATFORMS, parse_target
from piper_jax.targets.topology import require_compiler

TINY = str(Path(__file__).resolve().parents[2] / "configs" / "gpt_tiny.yaml")


@pytest.mark.parametrize(
    ("text", "num_devices"),
    [
        ("gpu:h100:1x8", 8), ("GPU:A100:2x4", 8), ("tpu:v5p:2x2x2", 8), ("tpu:v6e:4x4", 16), ("tpu:tpu7x:2x2x1", 8),
        ("tpu:v4:2x2x1", 8), ("cpu:8", 8), ("cpu", 1),
    ],
)  # fmt: skip
def test_targets_read_as_they_print(text: str, num_devices: int) -> None:
    target = parse_target(text)
    assert str(target) == text.lower()
    assert target.num_devices == len(target.topology.devices) == num_devices
    assert target.for_devices(3).num_devices == (3 if text == "cpu" else num_devices)
    assert all(isinstance(value, (bool, str)) for value in target.options.values())


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("h100", "is not FAMILY:CHIP:SHAPE.\nhelp: such as gpu:h100:1x8"),
        ("gpus:h100:1x8", "there is no family 'gpus'.\nhelp: did you mean 'gpu'?"),
        ("gpu:h10:1x8", "no gpu chip is called 'h10'.\nhelp: did you mean 'h100'?"),
        ("tpu:h100:2x2x1", "no tpu chip is called 'h100'.\nhelp: known: tpu7x, v4"),
        ("gpu:h100:8", "'8' is not the shape of h100.\nhelp: give 2 numbers from 1, such as 1x8, nodes x GPUs"),
        ("tpu:v5p:2x2", "'2x2' is not the shape of v5p.\nhelp: give 3 numbers from 1, such as 2x2x2"),
        ("tpu:v5e:2x0", "'2x0' is not the shape of v5e."),
        ("cpu:x", "'x' is not the shape of cpu.\nhelp: give a number from 1, such as 8, virtual devices."),
        ("gpu:h100:1x16", "a node has up to 8 GPUs.\nhelp: 2x8 is that many."),
    ],
)
def test_wrong_targets_say_what_is_meant(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_target(text)
    assert part in str(caught.value)


@pytest.fixture
def no_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {platform.package for platform in PLATFORMS.values()} - {""}
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in packages else find(name, *a))


@pytest.mark.usefixtures("no_compilers")
@pytest.mark.parametrize(("target", "extra"), [("gpu:h100:1x8", "cuda-aot"), ("tpu:v5p:2x2x2", "tpu-aot")])
def test_a_missing_compiler_exits_with_two_and_names_the_extra(target: str, extra: str) -> None:
    result = CliRunner().invoke(app, ["compile", TINY, "--target", target])
    assert result.exit_code == 2
    assert f"pip install 'piper-jax[{extra}]'" in result.stderr
    assert not result.stdout


def test_a_wrong_target_and_a_saved_plan_exit_with_two(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["compile", TINY, "--target", "gpu:h10:1x8"]).exit_code == 2
    result = CliRunner().invoke(app, ["compile", str(tmp_path / "plan.json"), "--target", "gpu:h100:1x8"])
    assert result.exit_code == 2
    assert "a saved plan has no model to plan or run" in result.stderr


def test_the_compiler_finds_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for platform in PLATFORMS.values():
        for name in platform.environment:
            monkeypatch.delenv(name, raising=False)
    target = parse_target("tpu:v5e:2x2")
    require_compiler(target)
    for name, value in target.platform.environment.items():
        assert os.environ[name] == value
        monkeypatch.delenv(name)
