"""Interleaved 1F1B: every rank runs several shorter stages (Narayanan et al., arXiv 2104.04473, section 2.2)."""

import piper_jax as piper
from piper_jax import where

OPTIONS = {
    "num_virtual_stages": "stages on each rank; 2",
    "interleaved_schedule": "`depth_first` (microbatches in rounds of the pipeline degree) or `breadth_first` (all "
    "microbatches through one stage, then the next; arXiv 2211.05953)",
    "communication_overlap": "forward and backward of the steady state share one program, a microbatch apart",
}


@piper.strategy("Interleaved1F1B", options=OPTIONS)
def interleaved_one_f_one_b(plan, options):
    """Stages p, p + P, p + 2P, ... run on rank p; the bubble shrinks by their number."""
    ranks, microbatches = options.pipeline_parallel, options.num_microbatches
    virtual, overlap = options.get("num_virtual_stages", 2), options.choice("communication_overlap", (False, True))
    if type(virtual) is not int or virtual < 1:
        raise piper.DirectiveError(f"num_virtual_stages={virtual!r} is not a number from 1.", help="use 2, 3, ...")
    depth_first = options.choice("interleaved_schedule", ("depth_first", "breadth_first")) == "depth_first"
    if depth_first:
        options.require_microbatches(multiple_of=ranks, rule=f"a multiple of pipeline_parallel={ranks}")
    turn = ranks if depth_first else microbatches
    rounds = [range(i, i + turn) for i in range(0, microbatches, turn)]
    plan = plan.cut(stages=ranks * virtual).split(where(), num_microbatches=microbatches)
    slots = []
    for rank in range(ranks):
        stages = range(rank, ranks * virtual, ranks)
        plan = plan.place(where(PP=tuple(stages)), group=options.group(rank))
        forward = [where(PP=s, MB=i, PASS="F") for part in rounds for s in stages for i in part]
        backward = [where(PP=s, MB=i, PASS="B") for part in rounds for s in reversed(stages) for i in part]
        warmup = min(2 * (ranks - 1 - rank) + (virtual - 1) * turn + overlap, len(forward))
        slots += forward[:warmup]
        for f, b in zip(forward[warmup:], backward, strict=False):
            slots += [(f, b)] if overlap else [f, b]
        slots += backward[len(forward) - warmup :]
    return plan.order(slots)
