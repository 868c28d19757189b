"""What a run leaves behind: its folder, and the metrics of its steps. Imports no JAX."""

from piper_jax.recording.folder import RunFolder
from piper_jax.recording.recorder import Recorder

__all__ = ["Recorder", "RunFolder"]
