"""Shows plans and reports: text grid, pictures, an interactive page, traces. Imports no JAX."""

from piper_jax.visualization.grid import grid_text

__all__ = ["grid_text"]
