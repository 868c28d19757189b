"""Faults that are asked for: each happens at its moment, and what never came is said."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from piper_jax.config import FaultSection
from piper_jax.train.injection import POISON, Faults

jax.devices()  # which process this is


def test_what_did_not_happen_is_named() -> None:
    faults = Faults(
        [
            FaultSection(step=2, kind="nan"),
            FaultSection(step=3, kind="nan"),
            FaultSection(step=4, kind="disk_full", moment="save"),
            FaultSection(step=9, kind="term", moment="evaluation"),
            FaultSection(step=9, kind="kill", process=1),
        ]
    )
    assert faults.batch(1, {"tokens": np.zeros((2, 3))})[POISON].sum() == 0
    assert faults.batch(2, {"tokens": np.zeros((2, 3))})[POISON].sum() == 1
    with faults.around_save(4):
        pass
    assert faults.missed() == ["nan at step 3", "term at step 9, moment evaluation"]


def test_a_signal_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr("os.kill", lambda _, number: sent.append(number))
    faults = Faults([FaultSection(step=1, kind="term")])
    for moment in ("data", "step", "step"):
        faults.reach(1, moment)
    assert len(sent) == 1
    assert faults.missed() == []
