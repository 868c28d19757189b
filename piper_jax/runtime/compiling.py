"""``piper.compile`` and ``piper.parallelize``: a plan that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax

from piper_jax.arguments import checked, shown
from piper_jax.device_map import DeviceMap
from piper_jax.errors import PlanError, RuntimeFault, TraceError, counted
from piper_jax.hints import From
from piper_jax.planning import Plan, Strategy, Unbound
from piper_jax.runtime.training import Train
from piper_jax.tracing.tracer import trace


@checked(RuntimeFault)
def compile(
    plan: Plan, devices: DeviceMap | Sequence[Any] | None = None, *, compile_limit: Annotated[float, From(0)] = 1800.0
) -> Train:
    """Lowers and compiles a plan; the first step compiles for its batch size, nothing else does.

    Args:
      plan: placed and ordered; it is completed and checked here.
      devices: a map of the plan's logical devices; or physical devices, indexed by logical id. By default the best map
        onto ``jax.devices()``.
      compile_limit: where several processes run the plan, seconds that each waits until all have compiled.

    Raises:
      PlanError: a rule is broken, the plan holds something that is not lowered, or a group is no slice of a TPU.
      RuntimeFault: too few devices.
    """
    if isinstance(plan.source, Unbound):
        raise PlanError(
            "compile: this plan has no traced program.", help="plan.bind(loss_fn, params, batch, optimizer=tx)"
        )
    plan.check()
    device_map = _device_map(plan, devices)
    device_map.require_slices()
    _require_all_processes(device_map)
    train = Train(plan=plan, devices=device_map.placed, device_map=device_map, compile_limit=compile_limit)
    train.instructions()
    return train


def _device_map(plan: Plan, devices: DeviceMap | Sequence[Any] | None) -> DeviceMap:
    if devices is None:
        return DeviceMap.of(plan, jax.devices())
    given = devices.devices if isinstance(devices, DeviceMap) else devices
    if not given or not all(isinstance(d, jax.Device) for d in given):
        raise RuntimeFault(f"compile: devices={shown(given)} are no JAX devices.", help="devices=jax.devices().")
    if not isinstance(devices, DeviceMap):
        return DeviceMap.given(plan, devices)
    if devices.dag.groups != plan.complete().groups:
        raise RuntimeFault(
            "compile: devices is a map of other groups than this plan's.", help="DeviceMap.of(plan, jax.devices())."
        )
    return devices


def _require_all_processes(device_map: DeviceMap) -> None:
    """Each process must have a part in the plan: it would wait for the others' metrics for ever."""
    idle = set(range(jax.process_count())) - {d.process_index for d in device_map.placed}
    if idle:
        raise RuntimeFault(
            f"compile: the plan needs {counted(len(device_map.placed), 'device')}, none of them in process "
            f"{', '.join(map(str, sorted(idle)))} of {jax.process_count()}.",
            help="start fewer processes, or raise a degree of the strategy.",
        )


@checked(TraceError)
def parallelize(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    optimizer: Any = None,
    strategy: Strategy | None = None,
    devices: DeviceMap | Sequence[Any] | None = None,
    wrt: Any = None,
) -> Train:
    """Trace, plan, check and compile in one call.

    Args:
      loss_fn, params, batch, optimizer, wrt: as for ``trace``.
      strategy: degrees and directives; None reads the annotations of the model's class.
      devices: as for ``compile``; a map may be of any plan with the same groups.
    """
    if strategy is None:
        strategy = Strategy.of(params)
    plan = trace(loss_fn, params, batch, optimizer=optimizer, wrt=wrt).apply(strategy)
    return compile(plan, devices)
