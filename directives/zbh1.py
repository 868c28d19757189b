"""ZB-H1: zero bubble with the memory of 1F1B (Qi et al., arXiv 2401.10241, section 3.1)."""

import piper_jax as piper
from piper_jax import where


@piper.strategy("ZBH1")
def zbh1(plan, options):
    """1F1B with a split backward; weight gradients fill two thirds of its bubble."""
    stages, microbatches = options.pipeline_parallel, options.num_microbatches
    plan = plan.cut(stages=stages).split(where(), num_microbatches=microbatches)
    slots = []
    for stage in range(stages):
        plan = plan.place(where(PP=stage), group=options.group(stage))
        f, bi, bw = ([where(PP=stage, MB=i, PASS=p) for i in range(microbatches)] for p in ("F", "BI", "BW"))
        warmup = stages - 1 - stage
        slots += f[:warmup]
        for i in range(microbatches):
            slots += (
                f[warmup + i : warmup + i + 1] + bi[i : i + 1] + (bw[i - stage : i - stage + 1] if i >= stage else [])
            )
        slots += bw[max(microbatches - stage, 0) :]
    return plan.order(slots)
