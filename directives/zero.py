"""ZeRO-1, 2 and 3: optimizer state, gradients and parameters sharded over the replicas (arXiv 1910.02054)."""

import piper_jax as piper
from piper_jax import where

ANY = {
    "communication_overlap": "collectives lie in one program with compute that does not need them",
    "bucket_bytes": "neighbouring parameters share one collective up to this many bytes",
}
GRADIENTS = {"reduce_every": 'when gradients are reduced to their shard: `"microbatch"`, after that many, or `"step"`'}
PARAMETERS = {"gather_distance": "how many slots ahead parameters are gathered; 1"}


def _replicated(plan, options, **sharded):
    wanted = dict(sharded)
    if options.choice("communication_overlap", (False, True)):
        wanted |= {"reduce_stream": "reduce", "gather_stream": "gather"}
    for name in ("bucket_bytes", "gather_distance", "reduce_every"):
        if options.get(name) is not None:
            wanted[name] = options.get(name)
    return plan.replicate(where(), axes=("data", "expert"), **wanted)


@piper.strategy("ZeRO-1", phase="replicate", options=ANY)
def zero_1(plan, options):
    """Each replica updates its part of the optimizer state, and all gather the parameters."""
    return _replicated(plan, options, shard_optimizer=True)


@piper.strategy("ZeRO-2", phase="replicate", options=ANY | GRADIENTS)
def zero_2(plan, options):
    """ZeRO-1, and gradients are reduced to their shard after every microbatch."""
    return _replicated(plan, options, shard_grads=True, reduce_every="microbatch")


@piper.strategy("ZeRO-3", phase="replicate", options=ANY | GRADIENTS | PARAMETERS)
def zero_3(plan, options):
    """ZeRO-2, and parameters are sharded between their uses; also called FSDP."""
    return _replicated(plan, options, shard_params=True, reduce_every="microbatch")
