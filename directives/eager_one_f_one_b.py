"""Eager 1F1B: a longer warm-up hides transfers between stages (Zhuang et al., arXiv 2211.05322)."""

import piper_jax as piper
from piper_jax import where


@piper.strategy("Eager1F1B")
def eager_one_f_one_b(plan, options):
    """1F1B whose stage s keeps up to ``2 (stages - s) - 1`` microbatches, so transfers have a slot to arrive in."""
    stages, microbatches = options.pipeline_parallel, options.num_microbatches
    plan = plan.cut(stages=stages).split(where(), num_microbatches=microbatches)
    slots = []
    for stage in range(stages):
        plan = plan.place(where(PP=stage), group=options.group(stage))
        forward = [where(PP=stage, MB=i, PASS="F") for i in range(microbatches)]
        backward = [where(PP=stage, MB=i, PASS="B") for i in range(microbatches)]
        warmup = min(2 * (stages - 1 - stage), microbatches)
        slots += forward[:warmup]
        for f, b in zip(forward[warmup:], backward, strict=False):
            slots += (f, b)
        slots += backward[microbatches - warmup :]
    return plan.order(slots)
