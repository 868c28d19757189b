"""Transfers between groups of which no one process drives all devices.

Where each device sends to one of its own process, every process moves its part alone. Otherwise all processes of both
groups run one program on the two groups side by side, a single ``ppermute``: the senders give their arrays, the
receivers arrays of zeros whose place the results take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from piper_jax.lowering.context import Context
from piper_jax.lowering.fences import after_fence
from piper_jax.lowering.group_mesh import OWNER, assembled, by_device, joint_mesh
from piper_jax.lowering.keys import Key
from piper_jax.lowering.placing import placed
from piper_jax.lowering.programs import Compiled, Compiler
from piper_jax.lowering.slots import local_spec

Call = Callable[..., Sequence[jax.Array]]


@dataclass(slots=True)
class Wire:
    """Programs that several processes run together, one after another, in the order of the plan in each process.

    Devices with streams keep that order. A CPU device starts what is ready: there each waits, in the host, for what it
    reads and for the one before it.
    """

    waits: bool
    _last: list[jax.Array] = field(default_factory=list)

    def ordered(self, call: Call) -> Call:
        if not self.waits:
            return call

        def ordered_call(*arrays: jax.Array) -> Sequence[jax.Array]:
            jax.block_until_ready([*arrays, *(a for a in self._last if not a.is_deleted())])
            results = call(*arrays)
            self._last = list(results)
            return results

        return ordered_call


def is_by_position(context: Context, source: str, target: str) -> bool:
    """Whether each device of ``source`` and the one that it sends to are of one process."""
    devices = zip(context.meshes[source].devices, context.meshes[target].devices, strict=False)
    alike = len(context.meshes[source].devices) == len(context.meshes[target].devices)
    return alike and all(a.process_index == b.process_index for a, b in devices)


def by_position(context: Context, reads: Sequence[Key], target: str) -> Call:
    """Each process copies its shards, each to the device in the same place of the other group."""
    source = context.meshes[reads[0].group].devices
    places = dict(zip(source, context.meshes[target].devices, strict=True))
    shardings = [context.sharding(k._replace(group=target)) for k in reads]

    def call(*arrays: jax.Array) -> list[jax.Array]:
        shards = [s for a in arrays for s in a.addressable_shards]
        moved = iter(jax.device_put([s.data for s in shards], [places[s.device] for s in shards]))
        return [
            jax.make_array_from_single_device_arrays(a.shape, sharding, [next(moved) for _ in a.addressable_shards])
            for a, sharding in zip(arrays, shardings, strict=True)
        ]

    return call


def permuted(
    context: Context, compiler: Compiler, label: str, reads: Sequence[Key], target: str
) -> tuple[Compiled, Call]:
    """The program that all processes of both groups run, and what calls it; receivers get arrays, the others nothing.

    Args:
      reads: on the sending group.
    """
    source = reads[0].group
    joint = joint_mesh([context.meshes[source], context.meshes[target]])
    specs = [local_spec(context, k) for k in reads]
    shapes = [context.register_shape(k, s.shape) for k, s in zip(reads, specs, strict=True)]
    own = [context.partition(k) for k in reads]
    partitions = [joint.stacked(p) for p in own]

    def body(*arrays: Any) -> list[Any]:
        env: dict[Key, Any] = {}
        fence, moved = Key("fence", source), []
        for array in arrays:
            (sent,) = after_fence(context, env, fence, [array])
            env[fence] = jax.lax.ppermute(sent, OWNER, [(0, 1)])
            moved.append(env[fence])
        return moved

    program = compiler.compile(
        body, label=label, mesh=joint.mesh, in_specs=partitions, out_specs=partitions,
        specs=[
            jax.ShapeDtypeStruct((2 * s[0], *s[1:]), spec.dtype) for s, spec in zip(shapes, specs, strict=True)
        ],
    )  # fmt: skip
    sends, receives = context.is_here(source), context.is_here(target)
    taken = [context.sharding(k._replace(group=target)) for k in reads]
    room: list[jax.Array] = []
    if receives:
        room = placed([np.zeros(s, spec.dtype) for s, spec in zip(shapes, specs, strict=True)], taken)

    def call(*arrays: jax.Array) -> list[jax.Array]:
        sides = [*([arrays] if sends else []), *([room] if receives else [])]
        results = program(*(joint.join(pair, p, 2 * s[0]) for *pair, p, s in zip(*sides, own, shapes, strict=True)))
        return (
            [assembled(by_device(r), s, t) for r, s, t in zip(results, shapes, taken, strict=True)] if receives else []
        )

    return program, call
