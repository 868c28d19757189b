"""Checkpoints: whole leaves in the model's own layout, written by Orbax in the background, with a hash of each."""

from piper_jax.checkpoint.checkpointer import Checkpointer, Loaded, Restored

__all__ = ["Checkpointer", "Loaded", "Restored"]
