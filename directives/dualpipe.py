"""DualPipe and DualPipeV: forwards overlap backwards (DeepSeek-V3, arXiv 2412.19437, section 3.2.1, and its code)."""

from collections import Counter, deque

import piper_jax as piper
from piper_jax import where

OPTIONS = {
    "schedule": "`interleaved_forward_backward`: the steady state pairs forward and backward of two microbatches",
    "communication_overlap": "a pair is one program, so each hides the communication of the other; `True`",
}


@piper.strategy("DualPipe", options=OPTIONS)
def dualpipe(plan, options):
    """Half of the microbatches enter at each end; every stage is on two ranks, which reduce its gradients together."""
    ranks, microbatches = options.pipeline_parallel, options.num_microbatches
    if ranks % 2:
        near = " or ".join(str(even) for even in (ranks - 1, ranks + 1) if even)
        raise piper.DirectiveError(
            f"DualPipe pairs ranks, so pipeline_parallel={ranks} must be even.",
            help=f"use pipeline_parallel={near}, or DualPipeV.",
        )
    options.require_microbatches(multiple_of=2, at_least=2 * ranks, rule=f"an even number from {2 * ranks}")
    plan, half = plan.cut(stages=ranks).split(where(), num_microbatches=microbatches), microbatches // 2
    slots = []
    for rank in range(ranks):
        own, other = (rank, range(half)), (ranks - 1 - rank, range(half, microbatches))
        plan = plan.place(where(PP=own[0], MB=own[1]) | where(PP=other[0], MB=other[1]), group=options.group(rank))
        arms = sorted((own, other))
        slots += _eight_steps(arms[0][0], ranks // 2, arms, options)
    return plan.order(slots)


@piper.strategy("DualPipeV", options=OPTIONS)
def dualpipe_v(plan, options):
    """DualPipe cut in half: rank p runs stages p and 2P - 1 - p of one V, so no stage is kept twice."""
    ranks, microbatches = options.pipeline_parallel, options.num_microbatches
    options.require_microbatches(at_least=2 * ranks, rule=f"at least twice pipeline_parallel={ranks}")
    plan = plan.cut(stages=2 * ranks).split(where(), num_microbatches=microbatches)
    slots = []
    for rank in range(ranks):
        arms = [(stage, range(microbatches)) for stage in (rank, 2 * ranks - 1 - rank)]
        plan = plan.place(where(PP=(arms[0][0], arms[1][0])), group=options.group(rank))
        slots += _eight_steps(rank, ranks, arms, options)
    return plan.order(slots)


def _eight_steps(rank, ranks, arms, options):
    """The slots of a rank; an arm is a stage and its microbatches. A task such as ``BI1`` is of the second arm."""
    options.choice("schedule", ("interleaved_forward_backward",))
    ahead, behind, main = ranks - 1 - rank, rank + 1, len(arms[0][1]) - 2 * ranks + rank + 1
    steps = ["F0"] * 2 * ahead + ["F0", "F1"] * behind + ["BI1", "BW", "F1"] * ahead
    steps += (["F0+B1", "F1+B0"] if ahead else ["F0", "B1", "F1+B0"]) + ["F0+B1", "F1+B0"] * (main - 1)
    steps += ["B1", "F1+B0"] * ahead + (["B1", "B0"] * behind)[:behind]
    steps += (["BI1", "BI0"] * (behind + 1))[behind % 2 :][:behind] + ["BW", "BI0"] * ahead + ["BW"] * behind
    if not options.choice("communication_overlap", (True, False)):
        steps = [task for step in steps for task in step.split("+")]
    seen, weights, slots = Counter(), deque(), []
    for step in steps:
        slot = []
        for task in step.split("+"):
            if task == "BW":
                slot.append(weights.popleft())
                continue
            stage, microbatches = arms[int(task[-1])]
            way = (task[0], stage)
            slot.append(where(PP=stage, MB=microbatches[seen[way]], PASS=task[:-1]))
            if task.startswith("BI"):
                weights.append(where(PP=stage, MB=microbatches[seen[way]], PASS="BW"))
            seen[way] += 1
        slots.append(tuple(slot))
    return slots
