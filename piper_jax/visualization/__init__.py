"""Shows plans and reports: text grid, pictures, an interactive page, traces, graphs. Imports no JAX."""

from piper_jax.visualization.drawing import draw
from piper_jax.visualization.grid import grid_text

__all__ = ["draw", "grid_text"]
