"""``python -m piper_jax`` is the command ``piper``."""

from piper_jax.cli import main

if __name__ == "__main__":
    main()
