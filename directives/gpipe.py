"""GPipe: all forwards, then all backwards (arXiv 1811.06965)."""

import piper_jax as piper
from piper_jax import where


@piper.strategy("GPipe")
def gpipe(plan, options):
    """Every stage holds the activations of all microbatches at its peak."""
    plan = plan.cut(stages=options.pipeline_parallel).split(where(), num_microbatches=options.num_microbatches)
    for stage in range(options.pipeline_parallel):
        plan = plan.place(where(PP=stage), group=options.group(stage))
    passes = [where(MB=i, PASS="F") for i in range(options.num_microbatches)]
    return plan.order(passes + [where(MB=i, PASS="B") for i in range(options.num_microbatches)])
