"""Models that others wrote and published, unchanged and without regions: cut automatically."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from oracle import Problem, assert_equivalent, strategy
from public_models import bart, gpt2, mamba2, nano_moe, resnet, vit

import piper_jax as piper

LIGHT, MORE = (mamba2, nano_moe), (gpt2, bart, vit, resnet)  # by default each of the light ones runs once
full = pytest.mark.full
MATRICES = {
    nano_moe: {"*Attention_0.Dense_1.kernel": 0, "*.expert_*.Dense_0.*": -1, "*.expert_*.Dense_1.kernel": 0},
    mamba2: {"*.in_proj.kernel": 1, "*.out_proj.kernel": 0},
}


@cache
def problem(model: Callable[[], Problem]) -> Problem:
    """Built once, so that strategies of the same slices share the reference."""
    return model()


@pytest.mark.parametrize(
    "model", [mamba2, *(pytest.param(m, marks=full) for m in (nano_moe, *MORE))], ids=lambda m: m.__name__
)
def test_under_1f1b_with_zero(model: Callable[[], Problem]) -> None:
    assert_equivalent(problem(model), strategy(stages=2, data=2, microbatches=2, zero_stage=1))


@pytest.mark.full
@pytest.mark.parametrize("model", [*LIGHT, *MORE], ids=lambda m: m.__name__)
def test_under_zero_bubbles(model: Callable[[], Problem]) -> None:
    assert_equivalent(problem(model), strategy(stages=2, data=2, microbatches=2, schedule="ZBH1"))


@pytest.mark.parametrize("model", [nano_moe, pytest.param(mamba2, marks=full)], ids=lambda m: m.__name__)
def test_matrices_divided_by_path(model: Callable[[], Problem]) -> None:
    chosen = strategy(stages=2, data=2, microbatches=2, tensor_parallel=2, zero_stage=1)
    divided = piper.directive("TensorParallel", dims=MATRICES[model])
    train = assert_equivalent(problem(model), replace(chosen, directives=(*chosen.directives, divided)))
    assert train.collectives()["F0 g0"]["all_reduce"]
