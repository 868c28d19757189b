"""Faults of one process: real processes, real signals, and the losses of a run that nothing happened to."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fresh_process import ROOT, environment

TINY = (
    "data.max_bytes=100000", "model.arguments.num_layers=2", "model.arguments.dropout=0.1", "devices.num_virtual=2",
    "strategy.data_parallel=1", "strategy.pipeline_parallel=1", "strategy.num_microbatches=1", "train.steps=8",
    "train.log_every=1", "evaluation.every=4", "evaluation.num_batches=1", "checkpoint.every=2",
)  # fmt: skip

pytestmark = [pytest.mark.needs_jax, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled programs, which every process but the first finds."""
    return tmp_path_factory.mktemp("compiled")


@contextmanager
def running(folder: Path, cache: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """``piper train``, which is killed in the end if it is still there."""
    command = [sys.executable, "-m", "piper_jax", "train", "configs/gpt_tiny.yaml", *TINY, f"folder={folder}"]
    process = subprocess.Popen(
        [*command, *overrides],
        cwd=ROOT,
        env=environment(cache, PYTHONUNBUFFERED="1"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def train(folder: Path, cache: Path, *overrides: str, code: int = 0) -> str:
    with running(folder, cache, *overrides) as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == code, said
    return said


def fault(step: int, moment: str, kind: str) -> str:
    return f"faults=[{{step: {step}, moment: {moment}, kind: {kind}}}]"


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}


def steps(folder: Path) -> list[int]:
    return sorted(int(found.name) for found in (folder / "checkpoints").glob("*") if found.name.isdigit())


@pytest.fixture(scope="module")
def undisturbed(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, float]]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    said = train(folder, cache)
    assert re.findall(r"^saved  step (\d+)", said, re.MULTILINE) == ["2", "4", "6", "8"]
    assert steps(folder) == [4, 6, 8]
    return losses(folder)


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=[pytest.mark.full, pytest.mark.timeout(1500)])])
def test_nothing_is_lost_beyond_the_last_commit(
    undisturbed: dict[int, tuple[float, float]], cache: Path, tmp_path: Path, kills: int
) -> None:
    """kill -9 at random moments, from before compiling until after the last step."""
    moments, folder, finished = random.Random(kills), tmp_path / "run", 0
    for _ in range(kills):
        before = steps(folder)[-1:]
        with running(folder, cache) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(("mfu", "finished")) and moments.random() < 0.5:
                    break
                if re.match(r"step [3-7]/8", line) and moments.random() < 0.4:
                    break
            time.sleep(moments.random() * 0.2)
            process.send_signal(signal.SIGKILL)
            finished += process.wait() == 0
        assert steps(folder)[-1:] >= before
    said = train(folder, cache)
    assert "resumed  from step" in said or "finished" in said
    assert losses(folder) == undisturbed


def test_a_signal_at_any_moment_leaves_the_step_that_was_done(
    undisturbed: dict[int, tuple[float, float]], cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    moments = [(0, "compile", "term", 0), (2, "data", "int", 1), (3, "step", "term", 3), (4, "evaluation", "int", 4)]
    for step, moment, kind, saved in [*moments, (6, "save", "term", 6)]:
        said = train(folder, cache, fault(step, moment, kind))
        assert f"stopped  SIG{kind.upper()}; the same command goes on" in said
        assert steps(folder)[-1:] == ([saved] if saved else [])
    assert "resumed  from step 6" in train(folder, cache)
    assert losses(folder) == undisturbed
    assert "finished  " in train(folder, cache)


@pytest.mark.full
def test_a_run_goes_on_under_another_strategy(
    undisturbed: dict[int, tuple[float, float]], cache: Path, tmp_path: Path
) -> None:
    """Two stages and one microbatch: the slice, and with it the masks of dropout, is the same."""
    folder = tmp_path / "run"
    train(folder, cache, fault(3, "step", "term"))
    assert "resumed  from step 3" in train(folder, cache, "strategy.pipeline_parallel=2")
    found = losses(folder)
    assert found.keys() == undisturbed.keys()
    assert all(found[step] == pytest.approx(values, rel=2e-5) for step, values in undisturbed.items())


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.full)]
)
def test_a_second_signal_ends_the_run_at_once(cache: Path, tmp_path: Path, number: int, code: int) -> None:
    """The first one waits for the step, which never ends."""
    with running(tmp_path / "run", cache, fault(3, "step", "hang")) as process:
        assert process.stdout is not None
        assert any(line.startswith("step 1/8") for line in process.stdout)
        time.sleep(0.5)
        process.send_signal(number)
        assert any("stopping after this step" in line for line in process.stdout)
        process.send_signal(number)
        assert process.wait(timeout=60) == code


# -- not finite ----------------------------------------------------------------------------------------------------
def test_a_loss_that_is_not_finite_changes_nothing_and_is_located(cache: Path, tmp_path: Path) -> None:
    stages = ("strategy.pipeline_parallel=2", "strategy.num_microbatches=2")
    folder, poison = tmp_path / "run", fault(3, "step", "nan")
    said = train(folder, cache, poison, *stages, code=4)
    assert "NonFiniteError: step 3: loss nan, gradient norm nan; it changed nothing." in said
    assert "first in stage 1, microbatch 1: F[PP=1,MB=1] " in said
    assert steps(folder) == [2]
    said = train(folder, cache, poison, *stages, "train.on_nonfinite=skip")
    assert "resumed  from step 2" in said
    assert "skipped  step 3: loss nan" in said
    found = losses(folder)
    assert all(abs(loss) < 10 for step, (loss, _) in found.items() if step != 3)


# -- damage --------------------------------------------------------------------------------------------------------
@pytest.mark.full
def test_a_damaged_newest_step_ends_the_run_or_is_passed_over(
    undisturbed: dict[int, tuple[float, float]], cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(folder, cache, fault(4, "evaluation", "term"))
    (folder / "checkpoints" / "4" / "params" / "embed.embedding" / "0.0").write_bytes(b"")
    said = train(folder, cache, code=3)
    assert "CheckpointError: checkpoint of step 4 is damaged: params embed.embedding." in said
    said = train(folder, cache, "checkpoint.on_corrupt=previous")
    assert "passed over  checkpoint of step 4 is damaged: params embed.embedding." in said
    assert "resumed  from step 2" in said
    assert steps(folder) == [4, 6, 8]
    assert losses(folder) == undisturbed


# -- saving --------------------------------------------------------------------------------------------------------
@pytest.mark.full
def test_a_full_disk_ends_the_run_or_is_borne(
    undisturbed: dict[int, tuple[float, float]], cache: Path, tmp_path: Path
) -> None:
    folder, full = tmp_path / "run", fault(4, "save", "disk_full")
    said = train(folder, cache, full, code=3)
    assert re.search(r"CheckpointError: checkpoint of step 4 could not be saved in .*: File too large\.", said)
    assert "the last one is that of step 2" in said
    said = train(folder, cache, full, "checkpoint.on_failure=continue")
    assert "NOT SAVED  checkpoint of step 4 could not be saved" in said
    assert steps(folder) == [2, 6, 8]
    assert losses(folder) == undisturbed
