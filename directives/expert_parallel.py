"""Expert parallelism: each device of the expert axis holds some of the experts (GShard, arXiv 2006.16668)."""

import piper_jax as piper
from piper_jax import where

OPTIONS = {"stream": 'the stream of the all_to_alls; `"compute"`'}


@piper.strategy("ExpertParallel", phase="shard", options=OPTIONS)
def expert_parallel(plan, options):
    """Each device of the expert axis holds some of the experts; `expert_parallel=` above 1 applies it."""
    return plan.shard(where(EP=...), axis="expert", stream=options.get("stream", "compute"))
