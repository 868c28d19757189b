"""Two real processes of one run: what happens to one of them ends or stops both, in order, and the run goes on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import fresh_process
import pytest
from fresh_process import ROOT

from piper_jax.processes.launching import free_port

TINY = (
    "data.max_bytes=100000", "model.arguments.num_layers=2", "model.arguments.dropout=0.1", "devices.num_virtual=2",
    "strategy.data_parallel=1", "strategy.num_microbatches=2", "train.steps=12", "evaluation.num_batches=1",
    "checkpoint.every=4",
)  # fmt: skip
LIMIT = 200

pytestmark = [pytest.mark.needs_jax, pytest.mark.timeout(2 * LIMIT)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compiled programs are kept: every run but the first finds them."""
    return fresh_process.environment(tmp_path_factory.mktemp("compiled"))


def piper(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "piper_jax", *words], cwd=ROOT, env=environment, text=True, capture_output=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip


def train(
    environment: dict[str, str], folder: Path, *overrides: str, count: int = 2
) -> subprocess.CompletedProcess[str]:
    launched = ("launch", "-n", str(count), "--") if count > 1 else ()
    return piper(environment, *launched, "train", "configs/gpt_tiny.yaml", *TINY, f"folder={folder}", *overrides)


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def fault(step: int, moment: str, kind: str, process: int) -> str:
    return f"faults=[{{step: {step}, moment: {moment}, kind: {kind}, process: {process}}}]"


def test_a_signal_to_one_process_stops_all_and_both_go_on_as_if_nothing_had_happened(
    environment: dict[str, str], tmp_path: Path
) -> None:
    alone, several = tmp_path / "alone", tmp_path / "several"
    assert train(environment, alone, count=1).returncode == 0
    stopped = train(environment, several, fault(5, "step", "term", 1))
    assert stopped.returncode == 0, stopped.stderr
    assert "[0] stopped  by another process; the same command goes on" in stopped.stdout
    saved = int(re.findall(r"saved  step (\d+)", stopped.stdout)[-1])
    assert 5 <= saved <= 8
    done = train(environment, several)
    assert done.returncode == 0, done.stderr
    assert f"[0] resumed  from step {saved}" in done.stdout
    assert losses(several) == losses(alone)


@pytest.mark.parametrize(
    ("moment", "kind", "code", "says"),
    [
        ("step", "kill", 5, r"piper launch: process 1 was ended by SIGKILL; the other 1 are stopped\."),
        ("data", "hang", 5, r"no process has gone on for 6 s\.(?s:.*)process 1: step 9, data \(for \d+ s\)"),
        pytest.param(
            "step", "nan", 4, r"step 9: loss nan(?s:.*)first in batch fault of microbatch 1", marks=pytest.mark.full
        ),
    ],
)
def test_what_happens_to_one_ends_all_and_says_what_it_was(
    environment: dict[str, str], tmp_path: Path, moment: str, kind: str, code: int, says: str
) -> None:
    started = time.monotonic()
    ended = train(environment, tmp_path / "run", "processes.step_limit=6", fault(9, moment, kind, int(kind != "nan")))
    assert ended.returncode == code, ended.stderr
    assert re.search(says, ended.stderr), ended.stderr
    assert "[0] saved  step 4" in ended.stdout
    assert time.monotonic() - started < LIMIT


def test_processes_of_different_configurations_do_not_start(environment: dict[str, str], tmp_path: Path) -> None:
    variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    command = [sys.executable, "-m", "piper_jax", "train", "configs/gpt_tiny.yaml", *TINY, f"folder={tmp_path / 'run'}"]
    both = [
        subprocess.Popen(
            [*command, f"optimizer.learning_rate=1e-{number + 2}"], cwd=ROOT, text=True, stderr=subprocess.PIPE,
            env={**environment, **variables, "JAX_PROCESS_ID": str(number)}, stdout=subprocess.DEVNULL,
        )
        for number in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=LIMIT)[1] for process in both]
    assert [process.returncode for process in both] == [5, 5], said
    for text in said:
        assert "the 2 processes differ in 1 thing" in text, text
        assert "configuration: " in text
