"""Tensor parallelism: matrices divided by their own partitioning metadata (Megatron-LM, arXiv 1909.08053)."""

import piper_jax as piper
from piper_jax import where

OPTIONS = {
    "rules": 'names of dimensions that the tensor axis divides, `{"mlp": "tensor"}` or pairs; the usual ones',
    "dims": 'dimensions by path, for parameters without names: `{"*.up.kernel": 1}`',
}


@piper.strategy("TensorParallel", phase="shard", options=OPTIONS)
def tensor_parallel(plan, options):
    """Parameters are divided by their metadata; the compiler adds collectives. `tensor_parallel=` applies it."""
    return plan.shard(where(), axis="tensor", rules=options.get("rules"), dims=options.get("dims"))
