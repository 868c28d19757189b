"""Activation checkpointing: the backward pass computes activations again (Chen et al., arXiv 1604.06174)."""

import piper_jax as piper
from piper_jax import where


@piper.strategy(
    "ActivationCheckpointing",
    phase="remat",
    options={
        "policy": "name of a policy in `jax.checkpoint_policies`: what is saved all the same; `nothing_saveable`",
        "path": "module path or pattern, or several: the stages (or experts) that hold these, whole; everything",
    },
)
def activation_checkpointing(plan, options):
    """Activations are computed again in the backward pass instead of kept."""
    return plan.remat(where(options.get("path")), policy=options.get("policy", "nothing_saveable"))
