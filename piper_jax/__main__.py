"""``python -m piper_jax`` is the command ``piper``."""

from piper_jax.cli import main

main()
