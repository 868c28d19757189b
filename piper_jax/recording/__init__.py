"""What a run leaves behind: its folder. Imports no JAX."""

from piper_jax.recording.folder import RunFolder

__all__ = ["RunFolder"]
