"""The optimizer section as an optax transformation whose state says what it did."""

from piper_jax.optimizers.averaging import AVERAGE
from piper_jax.optimizers.building import build_optimizer
from piper_jax.optimizers.observing import OBSERVED
from piper_jax.optimizers.schedules import learning_rate

__all__ = ["AVERAGE", "OBSERVED", "build_optimizer", "learning_rate"]
