"""Plans and strategies: the pure core above the IR."""

from __future__ import annotations

from piper_jax.planning.completion import complete
from piper_jax.planning.history import Applied
from piper_jax.planning.plan import Plan, Source, Unbound
from piper_jax.planning.registry import (
    Registered,
    find_strategy,
    load_strategies,
    strategies,
    strategies_text,
    strategy,
)
from piper_jax.planning.storage import load_plan, plan_from_json, plan_json
from piper_jax.planning.strategies import Directive, Strategy, StrategyOptions, directive

__all__ = [
    "Applied",
    "Directive",
    "Plan",
    "Registered",
    "Source",
    "Strategy",
    "StrategyOptions",
    "Unbound",
    "complete",
    "directive",
    "find_strategy",
    "load_plan",
    "load_strategies",
    "plan_from_json",
    "plan_json",
    "strategies",
    "strategies_text",
    "strategy",
]
