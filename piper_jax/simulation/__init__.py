"""Runs a plan on a clock: cost models, event engine, memory over time. Imports no JAX."""

from piper_jax.simulation.costs import CostModel, MeasuredCosts, RooflineCosts, UnitCosts
from piper_jax.simulation.hardware import HARDWARE, Hardware, Level
from piper_jax.simulation.measuring import measured_report
from piper_jax.simulation.report import MEMORY_KINDS, GroupMemory, GroupReport, MemoryStep, Report, Span
from piper_jax.simulation.simulator import simulate

__all__ = [
    "HARDWARE",
    "MEMORY_KINDS",
    "CostModel",
    "GroupMemory",
    "GroupReport",
    "Hardware",
    "Level",
    "MeasuredCosts",
    "MemoryStep",
    "Report",
    "RooflineCosts",
    "Span",
    "UnitCosts",
    "measured_report",
    "simulate",
]
