"""``python -m piper_jax.cli``: the script ``piper``, where it is not on the path."""

from piper_jax.cli.main import main

if __name__ == "__main__":
    main()
