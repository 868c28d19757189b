"""``piper launch`` starts, watches and stops its processes, whatever they run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from piper_jax.errors import ConfigError
from piper_jax.processes.launching import Launcher
from piper_jax.processes.requested import ADDRESS, COUNT, NUMBER, Requested, requested

ROOT = Path(__file__).parents[2]


def launched(code: str, count: int = 3) -> int:
    return Launcher(command=[sys.executable, "-c", code], count=count, grace=2.0).run()


def test_every_process_gets_its_number_and_their_lines_are_marked(capfd: pytest.CaptureFixture[str]) -> None:
    code = f"import os; print(os.environ['{NUMBER}'], os.environ['{COUNT}'], os.environ['{ADDRESS}'])"
    assert launched(code) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert [line[:7] for line in lines] == ["[0] 0 3", "[1] 1 3", "[2] 2 3"]
    assert len({line.split()[-1] for line in lines}) == 1


def test_the_first_failure_stops_the_others_and_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    code = f"import os, sys, time; sys.exit(3) if os.environ['{NUMBER}'] == '1' else time.sleep(60)"
    started = time.monotonic()
    assert launched(code) == 3
    assert time.monotonic() - started < 30
    assert "process 1 ended with exit code 3; the other 2 are stopped." in capfd.readouterr().err


def test_a_killed_process_is_named_and_the_code_is_5(capfd: pytest.CaptureFixture[str]) -> None:
    code = f"import os, signal, time\nif os.environ['{NUMBER}'] == '2': os.kill(os.getpid(), 9)\ntime.sleep(60)"
    assert launched(code) == 5
    assert "process 2 was ended by SIGKILL; the other 2 are stopped." in capfd.readouterr().err


def test_a_process_that_ignores_signals_is_killed() -> None:
    code = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"if os.environ['{NUMBER}'] == '0': time.sleep(0.5); sys.exit(1)\n"
        "time.sleep(60)"
    )
    assert launched(code, count=2) == 1


def test_signals_are_passed_on() -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    command = f"[sys.executable, '-c', {code!r}]"
    run = (
        "import sys; from piper_jax.processes.launching import Launcher\n"
        f"sys.exit(Launcher(command={command}, count=2).run())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", run], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as found:
        assert found.stdout is not None
        assert {found.stdout.readline(), found.stdout.readline()} == {"[0] ready\n", "[1] ready\n"}
        found.send_signal(signal.SIGTERM)
        assert found.wait(30) == 0


def test_what_the_environment_asks_for() -> None:
    given = {ADDRESS: "host:1", COUNT: "4", NUMBER: "3"}
    assert requested(given) == Requested(cluster="variables", address="host:1", count=4, number=3)
    assert requested({}) is None
    assert requested({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    assert requested({"SLURM_NTASKS": "8", "SLURM_PROCID": "5"}) == Requested(cluster="Slurm", count=8, number=5)
    assert requested({"TPU_WORKER_HOSTNAMES": "a,b"}) == Requested(cluster="TPU pod")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({COUNT: "4", NUMBER: "1"}, f"{ADDRESS} not"),
        ({ADDRESS: "a:1"}, f"{COUNT} and {NUMBER} not"),
        ({ADDRESS: "a", COUNT: "4", NUMBER: "1"}, "has no port"),
        ({"SLURM_NTASKS": "4"}, "SLURM_PROCID is not set: Slurm did not start this process"),
        ({ADDRESS: "a:1", COUNT: "4", NUMBER: "4"}, "there are JAX_NUM_PROCESSES=4"),
        ({ADDRESS: "a:1", COUNT: "four", NUMBER: "1"}, "'four' is no number"),
    ],
)
def test_what_is_half_said_is_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        requested(given)
