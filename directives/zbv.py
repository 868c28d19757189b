"""ZB-V: zero bubble on a V of two stages per rank (Qi et al., arXiv 2401.10241, section 6)."""

from collections import Counter

import piper_jax as piper
from piper_jax import where


@piper.strategy("ZBV")
def zbv(plan, options):
    """Rank p runs stages p and 2P - 1 - p with split backwards; the memory is that of 1F1B on every rank."""
    ranks, microbatches = options.pipeline_parallel, options.num_microbatches
    plan = plan.cut(stages=2 * ranks).split(where(), num_microbatches=microbatches)
    slots = []
    for rank in range(ranks):
        stages = (rank, 2 * ranks - 1 - rank)
        plan = plan.place(where(PP=stages), group=options.group(rank))
        seen = Counter()
        for task in _tasks(rank, ranks, max(microbatches, 2 * ranks - 1)):
            if seen[task] < microbatches:
                slots.append(where(PP=stages[int(task[-1])], MB=seen[task], PASS=task[:-1]))
            seen[task] += 1
    return plan.order(slots)


def _tasks(rank, ranks, microbatches):
    """The tasks of a rank, such as ``BI1``: pass and arm of the V. Fewer microbatches leave out the last ones."""
    fill, up = ranks - rank, ["F1", "BI1", "BW1"]
    tasks = ["F0"] * (2 * fill - 1) + ["F1", "F0"] * rank + up * fill
    tasks += ["F0", "BI0", "BW0", *up] * (microbatches - ranks - fill + 1) + ["BI0", "BW0", *up] * (fill - 1)
    return tasks + ["BI0", "BI1"] * rank + ["BI0", "BW0"] * fill + ["BW1"] * rank + ["BW0"] * rank
