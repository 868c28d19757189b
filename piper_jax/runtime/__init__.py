"""Runs lowered plans: executor, state, training object, and the one-device reference."""

from piper_jax.runtime.compiling import compile, parallelize
from piper_jax.runtime.training import Train

__all__ = ["Train", "compile", "parallelize"]
