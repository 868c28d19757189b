"""The command ``piper``."""

from piper_jax.cli.main import main

__all__ = ["main"]
