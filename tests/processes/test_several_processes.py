"""Several processes that run one plan give what one process with all devices gives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from steps_process import LIMIT_SECONDS

from piper_jax.processes.launching import Launcher

TOLERANCE = 2e-5
WORKER = Path(__file__).parent / "steps_process.py"
SMALL = [("tied_small", 2), ("across_small", 2)]
ALL = [(name, count) for name in ("tied", "across", "two_way", "experts", "tensor") for count in (2, 4)]
EXACT = {("tied_small", 2), ("tied", 2), ("tied", 4), ("experts", 2), ("tensor", 2)}
"""Each group whose members add anything up lies in one process."""

pytestmark = [pytest.mark.needs_jax, pytest.mark.timeout(LIMIT_SECONDS * 2)]


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int, tuple[str, ...]], Path]:
    """Runs cases in a number of processes, once; returns the folder of what they wrote."""
    folder, known = tmp_path_factory.mktemp("steps"), set()

    def run(count: int, devices: int, names: tuple[str, ...]) -> Path:
        if (count, names) not in known:
            command = [sys.executable, str(WORKER), str(folder), str(devices), *names]
            assert Launcher(command=command, count=count).run() == 0
            known.add((count, names))
        return folder

    return run


@pytest.mark.parametrize(("name", "count"), [*SMALL, *(pytest.param(*cell, marks=pytest.mark.full) for cell in ALL)])
def test_steps_are_those_of_one_process(
    taken: Callable[[int, int, tuple[str, ...]], Path], name: str, count: int
) -> None:
    chosen, devices = (SMALL, 4) if (name, count) in SMALL else (ALL, 8)
    folder = taken(1, devices, tuple(dict.fromkeys(n for n, _ in chosen)))
    taken(count, devices, tuple(n for n, number in chosen if number == count))
    alone = np.load(folder / f"{name}-0-of-1.npz")
    for process in range(count):
        found = np.load(folder / f"{name}-{process}-of-{count}.npz")
        assert found.files == alone.files
        for leaf in alone.files:
            _assert_same(found[leaf], alone[leaf], exact=(name, count) in EXACT)


def _assert_same(found: np.ndarray, expected: np.ndarray, *, exact: bool) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if exact or expected.dtype.kind != "f":
        np.testing.assert_array_equal(found, expected)
    else:
        scale = np.abs(expected).max(initial=0.0)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * scale)
