"""From a Flax model and a loss function to the global training DAG."""

from piper_jax.tracing.annotations import (
    Last,
    Mean,
    Sum,
    WeightedLoss,
    annotate,
    expert_region,
    mean_over_replicas,
)
from piper_jax.tracing.carried_state import Carried
from piper_jax.tracing.tracer import trace

__all__ = [
    "Carried",
    "Last",
    "Mean",
    "Sum",
    "WeightedLoss",
    "annotate",
    "expert_region",
    "mean_over_replicas",
    "trace",
]
