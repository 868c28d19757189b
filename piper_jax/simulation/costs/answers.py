"""What a cost model answers for the nodes of a plan, checked: anyone may write a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from piper_jax.arguments import shown
from piper_jax.errors import ConfigError, PiperError
from piper_jax.hints import fits
from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Node
from piper_jax.planning.history import first_line
from piper_jax.simulation.costs.base import Cost, CostModel, Link
from piper_jax.simulation.hardware import is_finite, require_numbers


def costs_of(model: CostModel, dag: Dag, nodes: Sequence[Node]) -> list[Cost]:
    """The cost of each node.

    Raises:
      ConfigError: the model fails, or what it answers is not a :class:`Cost` of a finite duration from 0; names the
        model and the node.
    """
    owner = type(model).__name__
    if model.concurrency is not None:
        require_numbers(owner, above=0, concurrency=model.concurrency)
    capacity = cast(object, model.device_bytes)
    if model.time_unit not in ("s", "") or not isinstance(capacity, int | None):
        raise ConfigError(
            f"{owner}: time_unit={shown(model.time_unit)}, device_bytes={shown(model.device_bytes)}.",
            help='time_unit is "s" or "" (ticks), device_bytes a whole number or None.',
        )
    cost, found = _bound(model, dag), list[Cost]()
    for node in nodes:
        try:
            answer = cost(node)
        except PiperError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{owner} fails for {node.id}: {first_line(error)}",
                help="bind(dag) gives a function from node to Cost.",
            ) from error
        fault = _fault(answer)
        if fault:
            raise ConfigError(
                f"{owner}: {fault} for {node.id}.", help="give Cost(seconds), finite and from 0.", node=node.id
            )
        found.append(answer._replace(duration=float(answer.duration)))
    return found


def _bound(model: CostModel, dag: Dag) -> Callable[[Node], Cost]:
    try:
        return model.bind(dag)
    except PiperError:
        raise
    except Exception as error:
        fault = f"{type(model).__name__}.bind fails: {first_line(error)}"
        raise ConfigError(fault, help="bind(dag) gives a function from node to Cost.") from error


def _fault(answer: object) -> str:
    if not isinstance(answer, Cost):
        return f"{shown(answer)} is not a Cost"
    if not is_finite(answer.duration) or answer.duration < 0:
        return f"the cost is {shown(answer.duration)}"
    if not fits(tuple[Link, ...])(answer.links):
        return f"links={shown(answer.links)} are no tuple of Link"
    return ""
