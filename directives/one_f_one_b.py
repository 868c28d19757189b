"""1F1B: each stage warms up, then alternates one forward and one backward (PipeDream-Flush, arXiv 2006.09503)."""

import piper_jax as piper
from piper_jax import where


@piper.strategy("1F1B")
def one_f_one_b(plan, options):
    """Stage s holds at most ``stages - s`` microbatches; the bubble is that of GPipe, the memory is not."""
    stages, microbatches = options.pipeline_parallel, options.num_microbatches
    plan = plan.cut(stages=stages).split(where(), num_microbatches=microbatches)
    slots = []
    for stage in range(stages):
        plan = plan.place(where(PP=stage), group=options.group(stage))
        forward = [where(PP=stage, MB=i, PASS="F") for i in range(microbatches)]
        backward = [where(PP=stage, MB=i, PASS="B") for i in range(microbatches)]
        warmup = min(stages - 1 - stage, microbatches)
        slots += forward[:warmup]
        for f, b in zip(forward[warmup:], backward, strict=False):
            slots += (f, b)
        slots += backward[microbatches - warmup :]
    return plan.order(slots)
