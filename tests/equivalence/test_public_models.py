"""Models that others wrote and published, unchanged and without regions: cut automatically."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from oracle import Problem, assert_equivalent, strategy
from public_models import bart, gpt2, mamba2, nano_moe, resnet, vit

LIGHT, MORE = (mamba2, nano_moe), (gpt2, bart, vit, resnet)
full = pytest.mark.full


@cache
def problem(model: Callable[[], Problem]) -> Problem:
    """Built once, so that strategies of the same slices share the reference."""
    return model()


@pytest.mark.parametrize("model", [*LIGHT, *(pytest.param(m, marks=full) for m in MORE)], ids=lambda m: m.__name__)
def test_under_1f1b_with_zero(model: Callable[[], Problem]) -> None:
    assert_equivalent(problem(model), strategy(stages=2, data=2, microbatches=2, zero_stage=1))


@pytest.mark.full
@pytest.mark.parametrize("model", [*LIGHT, *MORE], ids=lambda m: m.__name__)
def test_under_zero_bubbles(model: Callable[[], Problem]) -> None:
    assert_equivalent(problem(model), strategy(stages=2, data=2, microbatches=2, schedule="ZBH1"))
