"""``place``: which group of devices runs which nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from piper_jax.arguments import require_fields
from piper_jax.errors import DirectiveError
from piper_jax.hints import Name
from piper_jax.ir.dag import Dag
from piper_jax.ir.device_groups import axes_of, impossible
from piper_jax.ir.filters import Filter
from piper_jax.ir.forward import Rewritten
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Compute, DeviceGroup
from piper_jax.ir.selection import keep_index, select


def place(
    dag: Dag, filter: Filter, *, group: DeviceGroup | Sequence[int] | int | str, stream: Name = "compute"
) -> Rewritten:
    """Runs the selected nodes on a group of devices.

    Data edges that cross groups become matched sends and receives when the plan is completed. Filters may name MB: that
    is how a two-way schedule sends half of the microbatches the other way. Alpa calls the groups meshes; JaxPP and
    torch.pipelining call them ranks or actors. ::

        F[PP=0] layers.0   --data-->   F[PP=1] layers.1
        -->  place(where(PP=0), group=(0, 1)); place(where(PP=1), group=(2, 3))
        d0-1: F[PP=0] layers.0, send   --transfer-->   d2-3: recv, F[PP=1] layers.1

    Args:
      dag: the plan's DAG, in which nothing is ordered yet.
      filter: nodes that have no other group yet.
      group: a DeviceGroup, the name of one that the plan has, one logical device or a tuple of them (axis ``data``).
      stream: nodes of one stream run one after another; different streams may overlap.

    Raises:
      DirectiveError: a node is placed already, the group overlaps another one, or the plan is ordered.
    """
    if dag.slots:
        raise DirectiveError("place comes before order.", help="call plan.place(...) before plan.order([...]).")
    target = _resolve(dag, group)
    nodes = dict(dag.nodes)
    for node in select(dag, filter):
        old = nodes[node]
        if not isinstance(old, Compute):
            raise DirectiveError(
                f"{filter} selects an update; updates run where their state is used.", help='leave PASS="U" out.'
            )
        if old.group not in (None, target.name):
            raise _placed_twice(node, old.group, target.name)
        nodes[node] = Compute(id=node, group=target.name, stream=stream)
    found = sorted({**dag.groups, target.name: target}.values(), key=lambda known: min(known.devices))
    return Rewritten(keep_index(dag, replace(dag, nodes=nodes, groups={known.name: known for known in found})))


def _placed_twice(node: NodeId, old: str | None, new: str) -> DirectiveError:
    return DirectiveError(
        f"{node} is on {old} already, and cannot be on {new} too.",
        help="let each node be selected by one place directive; name MB to split microbatches between groups.",
        conflict="place",
        node=node,
    )


def _resolve(dag: Dag, group: DeviceGroup | Sequence[int] | int | str) -> DeviceGroup:
    """The group that is meant, with explicit axes, checked against the plan's other groups."""
    if isinstance(group, str):
        if group not in dag.groups:
            raise DirectiveError(
                f"the plan has no group {group!r}.", help=f"groups so far: {', '.join(dag.groups) or 'none'}."
            )
        return dag.groups[group]
    if isinstance(group, DeviceGroup):
        named = group
    else:
        devices = (group,) if isinstance(group, int) else tuple(group)
        named = DeviceGroup(name=_name(devices), devices=devices)
    require_fields(named, DirectiveError, "DeviceGroup: ")
    resolved = replace(named, axes=axes_of(named))
    _require_sound(resolved)
    name, devices = resolved.name, resolved.devices
    for other in dag.groups.values():
        if other == resolved or (not isinstance(group, DeviceGroup) and other.devices == devices):
            return other
        shared = sorted(set(devices).intersection(other.devices))
        if shared or other.name == name:
            raise DirectiveError(
                f"group {name} {devices} clashes with group {other.name} {other.devices}.",
                detail=(f"shared devices: {shared}",) if shared else (),
                help="groups are disjoint and have different names.",
            )
    return resolved


def _require_sound(group: DeviceGroup) -> None:
    fault = impossible(group)
    if fault is not None:
        raise DirectiveError(fault[0], help=fault[1])
    if "+" in group.name:
        raise DirectiveError(f"group name {group.name!r}: '+' is for joint groups.", help="use another name.")


def _name(devices: tuple[int, ...]) -> str:
    if len(devices) > 1 and devices == tuple(range(devices[0], devices[0] + len(devices))):
        return f"d{devices[0]}-{devices[-1]}"
    return "d" + ",".join(str(device) for device in devices)
