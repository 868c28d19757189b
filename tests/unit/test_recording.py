"""Metrics in files: what is written, and that a run that goes on neither repeats nor loses steps."""

from __future__ import annotations

import json
import math
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from piper_jax.config import load_config_text
from piper_jax.errors import ConfigError
from piper_jax.recording import Recorder, RunFolder


def opened(folder: Path, *, after: int = 0, text: str = "") -> Recorder:
    return Recorder.open(load_config_text(text), RunFolder(folder).make(), after=after)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]


def events(folder: Path) -> list[Event]:
    found: list[Event] = []
    for path in sorted(RunFolder(folder).tensorboard.iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def test_a_run_that_goes_on_has_every_step_once(tmp_path: Path):
    with opened(tmp_path) as recorder:
        recorder.say(0, {"formula": "6 N", "bubble_simulated": 0.25})
        for step in (1, 2, 3):
            recorder.record(step, {"loss": 3.0 - step, "grad_norm": math.inf if step == 2 else 1.0})
    with RunFolder(tmp_path).metrics.open("a") as file:
        file.write('{"step": 2, "los')  # the process was killed
    with opened(tmp_path, after=2) as recorder:
        recorder.record(3, {"loss": 0.5})
    found = lines(tmp_path)
    assert [line["step"] for line in found] == [0, 1, 2, 3]
    assert [line.get("loss") for line in found] == [None, 2.0, 1.0, 0.5]
    assert found[0]["facts"] == {"formula": "6 N", "bubble_simulated": 0.25}
    assert found[2]["grad_norm"] is None
    seen = events(tmp_path)
    (start,) = [n for n, event in enumerate(seen) if event.HasField("session_log")]
    assert seen[start].step == 3  # TensorBoard hides what came from this step on before it
    losses = [(e.step, v.simple_value) for e in seen for v in e.summary.value if v.tag == "loss"]
    assert losses == [(1, 2.0), (2, 1.0), (3, 0.0), (3, 0.5)]


def test_a_line_is_in_the_file_before_the_next(tmp_path: Path):
    recorder = opened(tmp_path)
    recorder.record(1, {"loss": 1.0})
    assert lines(tmp_path)[0]["loss"] == 1.0
    recorder.close()


class FakeRun:
    def __init__(self, **given: Any):
        self.given, self.logged, self.config, self.finished = given, [], {}, False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_weights_and_biases_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runs: list[FakeRun] = []
    module = ModuleType("wandb")
    module.init = lambda **given: runs.append(FakeRun(**given)) or runs[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    for after in (0, 1):
        with opened(tmp_path, after=after, text="logging: {wandb: {project: mine, mode: offline}}") as recorder:
            recorder.record(after + 1, {"loss": 1.0})
    assert [run.logged for run in runs] == [[(1, {"loss": 1.0})], [(2, {"loss": 1.0})]]
    assert runs[0].given["id"] == runs[1].given["id"]
    assert runs[0].given["project"] == "mine"
    assert runs[0].given["config"]["train"]["steps"] == 100
    assert all(run.finished for run in runs)


def test_weights_and_biases_without_its_package_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ConfigError, match=r"the package wandb is not installed.\nhelp: pip install 'piper-jax\[wandb\]'"
    ):
        opened(tmp_path, text="logging: {wandb: {project: mine}}")


def test_processes_but_the_first_record_nothing():
    with Recorder() as recorder:
        recorder.record(1, {"loss": 1.0})
