"""piper-jax: plan how a JAX training step is spread over devices, apart from the model.

``import piper_jax as piper``. Public names are imported on first use, so planning needs no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piper_jax.checkpoint import Checkpointer
    from piper_jax.device_map import DeviceMap
    from piper_jax.errors import (
        AnnotationError,
        CheckpointError,
        ConfigError,
        DirectiveError,
        FilterError,
        PiperError,
        PlanError,
        ProcessFault,
        RuntimeFault,
        TraceError,
    )
    from piper_jax.ir.filters import where
    from piper_jax.planning import Directive, Plan, Strategy, StrategyOptions, directive, load_plan, strategy
    from piper_jax.processes.joining import join_processes
    from piper_jax.runtime import compile, parallelize
    from piper_jax.simulation import simulate
    from piper_jax.topology import Topology
    from piper_jax.tracing import (
        Carried,
        Last,
        Mean,
        Sum,
        WeightedLoss,
        annotate,
        expert_region,
        mean_over_replicas,
        trace,
    )
    from piper_jax.visualization import draw

_HOMES = {
    "piper_jax.checkpoint": ("Checkpointer",),
    "piper_jax.device_map": ("DeviceMap",),
    "piper_jax.errors": (
        "AnnotationError",
        "CheckpointError",
        "ConfigError",
        "DirectiveError",
        "FilterError",
        "PiperError",
        "PlanError",
        "ProcessFault",
        "RuntimeFault",
        "TraceError",
    ),
    "piper_jax.ir.filters": ("where",),
    "piper_jax.planning": ("Directive", "Plan", "Strategy", "StrategyOptions", "directive", "load_plan", "strategy"),
    "piper_jax.tracing": (
        "Carried",
        "Last",
        "Mean",
        "Sum",
        "WeightedLoss",
        "annotate",
        "expert_region",
        "mean_over_replicas",
        "trace",
    ),
    "piper_jax.processes.joining": ("join_processes",),
    "piper_jax.runtime": ("compile", "parallelize"),
    "piper_jax.simulation": ("simulate",),
    "piper_jax.topology": ("Topology",),
    "piper_jax.visualization": ("draw",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AnnotationError",
    "Carried",
    "CheckpointError",
    "Checkpointer",
    "ConfigError",
    "DeviceMap",
    "Directive",
    "DirectiveError",
    "FilterError",
    "Last",
    "Mean",
    "PiperError",
    "Plan",
    "PlanError",
    "ProcessFault",
    "RuntimeFault",
    "Strategy",
    "StrategyOptions",
    "Sum",
    "Topology",
    "TraceError",
    "WeightedLoss",
    "annotate",
    "compile",
    "directive",
    "draw",
    "expert_region",
    "join_processes",
    "load_plan",
    "mean_over_replicas",
    "parallelize",
    "simulate",
    "strategy",
    "trace",
    "where",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'piper_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
