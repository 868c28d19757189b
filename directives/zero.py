"""ZeRO-1, 2 and 3: optimizer state, gradients and parameters sharded over the replicas (arXiv 1910.02054)."""

import piper_jax as piper
from piper_jax import where

OPTIONS = {
    "communication_overlap": "collectives run on streams of their own, beside the compute",
    "bucket_bytes": "neighbouring parameters share one collective up to this many bytes",
}


def _replicated(plan, options, **sharded):
    streams = {}
    if options.get("communication_overlap", False):
        streams = {"reduce_stream": "reduce", "gather_stream": "gather"}
    if options.get("bucket_bytes") is not None:
        streams["bucket_bytes"] = options["bucket_bytes"]
    return plan.replicate(where(), axes=("data", "expert"), **sharded, **streams)


@piper.strategy("ZeRO-1", phase="replicate", options=OPTIONS)
def zero_1(plan, options):
    """Each replica updates its part of the optimizer state, and all gather the parameters."""
    return _replicated(plan, options, shard_optimizer=True)


@piper.strategy("ZeRO-2", phase="replicate", options=OPTIONS)
def zero_2(plan, options):
    """ZeRO-1, and gradients are reduced to their shard after every microbatch."""
    return _replicated(plan, options, shard_grads=True, reduce_every="microbatch")


@piper.strategy("ZeRO-3", phase="replicate", options=OPTIONS | {"gather_distance": "uses ahead that parameters come"})
def zero_3(plan, options):
    """ZeRO-2, and parameters are sharded between their uses; also called FSDP."""
    distance = options.get("gather_distance", 1)
    return _replicated(plan, options, shard_params=True, reduce_every="microbatch", gather_distance=distance)
