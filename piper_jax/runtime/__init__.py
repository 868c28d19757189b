"""Runs lowered plans: executor, state, training object, and the one-device reference."""

from piper_jax.runtime.training import Train, compile, parallelize

__all__ = ["Train", "compile", "parallelize"]
