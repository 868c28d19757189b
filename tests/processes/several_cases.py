"""What several processes run: each mechanism that can lie across them, on eight devices in all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oracle import Problem, strategy
from test_mixtures import DROPLESS, SIGMOID
from test_mixtures import problem as mixture
from tiny_models import Tower, cross_entropy, tokens

import piper_jax as piper


def weighted_loss(model: Any, batch: Any) -> Any:
    """Also gives a value of each row, and a sum: metrics of every kind cross processes."""
    losses = cross_entropy(model(batch["x"]), batch["y"])
    total = (losses * batch["mask"]).sum()
    weight = batch["mask"].sum().astype("float32")
    return piper.WeightedLoss(total, weight), {"row": losses.mean(-1), "valid": piper.Sum(batch["mask"].sum())}


def tower(**options: Any) -> Problem:
    model = Tower(**options)
    return Problem(loss_fn=weighted_loss, params=model, batch=tokens(rows=48))


def divided() -> piper.Strategy:
    directives = (
        piper.directive("1F1B"),
        piper.directive("TensorParallel", dims={"layers.*.up.kernel": 1, "layers.*.up.bias": 0}),
    )
    return piper.Strategy(
        data_parallel=2, pipeline_parallel=2, tensor_parallel=2, num_microbatches=3, directives=directives
    )


# Each kind by itself is on eight devices; the first two have them on four, for the default suite.
CASES: dict[str, Callable[[], tuple[Problem, piper.Strategy]]] = {
    "tied_small": lambda: (
        tower(layers=2, tied=True, dropout=0.3),
        strategy(stages=2, data=2, microbatches=2, zero_stage=1),
    ),
    "across_small": lambda: (tower(layers=2), strategy(data=4, microbatches=2, zero_stage=3)),
    # tied over the first and the last stage, dropout, clipping by the norm of all groups
    "tied": lambda: (
        tower(tied=True, dropout=0.3),
        strategy(stages=4, data=2, microbatches=4, zero_stage=1),
    ),
    # every stage on all processes: reductions, gathers and exchanges between them
    "across": lambda: (tower(), strategy(data=8, microbatches=2, zero_stage=3)),
    # each stage on two groups
    "two_way": lambda: (tower(), strategy(stages=4, data=2, microbatches=8, schedule="DualPipe", zero_stage=2)),
    "experts": lambda: (
        mixture(SIGMOID | DROPLESS | {"num_layers": 4}),
        strategy(stages=2, data=2, microbatches=4, schedule="DualPipeV", zero_stage=1, expert_parallel=2),
    ),
    "tensor": lambda: (tower(), divided()),
}
