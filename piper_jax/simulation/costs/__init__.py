"""Cost models, one file each: unit, roofline, measured."""

from piper_jax.simulation.costs.base import Cost, CostModel, Link
from piper_jax.simulation.costs.measured import MeasuredCosts
from piper_jax.simulation.costs.roofline import RooflineCosts
from piper_jax.simulation.costs.unit import UnitCosts

__all__ = ["Cost", "CostModel", "Link", "MeasuredCosts", "RooflineCosts", "UnitCosts"]
