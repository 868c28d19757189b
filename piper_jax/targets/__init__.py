"""Compiles a finished plan for hardware that is not there, and says whether its collectives are hidden.

``from piper_jax.targets.ahead import compile_ahead``. Parsing a target imports no JAX.
"""
