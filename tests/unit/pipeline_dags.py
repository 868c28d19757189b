"""Completed pipeline DAGs built by hand, for tests that need no directive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import (
    Bucket,
    Compute,
    DataEdge,
    DeviceGroup,
    Leaf,
    Node,
    Op,
    Recv,
    Send,
    Update,
    Value,
)

Task = tuple[str, int]  # pass, microbatch
Schedule = Callable[[int, int, int], list[Task]]  # stage, stages, microbatches

ACTIVATION, RESIDUAL, PARAMETER, OPTIMIZER = 4096, 65536, 1 << 20, 1 << 21


def gpipe(stage: int, stages: int, microbatches: int) -> list[Task]:
    """All forwards, then all backwards."""
    return [("F", mb) for mb in range(microbatches)] + [("B", mb) for mb in range(microbatches)]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Task]:
    """A warm-up of forwards, one by one in turn, a cool-down of backwards."""
    warm = min(stages - stage - 1, microbatches)
    tasks: list[Task] = [("F", mb) for mb in range(warm)]
    for mb in range(microbatches - warm):
        tasks += [("F", warm + mb), ("B", mb)]
    return tasks + [("B", mb) for mb in range(microbatches - warm, microbatches)]


def pipeline_dag(schedule: Schedule, stages: int, microbatches: int, *, devices_per_stage: int = 1) -> Dag:
    """One op per stage and group, transfers between neighbours, one update per stage."""
    nodes: dict[NodeId, Node] = {}
    data: list[DataEdge] = []
    for stage in range(stages):
        for mb in range(microbatches):
            for PASS in ("F", "B"):
                node_id = NodeId(f"layers.{stage}", PASS, PP=stage, MB=mb)
                nodes[node_id] = Compute(id=node_id, group=f"g{stage}")
        update = NodeId(f"update g{stage}", "U")
        nodes[update] = Update(id=update, group=f"g{stage}", buckets=(f"layers.{stage}",))
    for stage in range(stages):
        for mb in range(microbatches):
            forward, backward = (NodeId(f"layers.{stage}", PASS, PP=stage, MB=mb) for PASS in ("F", "B"))
            data.append(DataEdge(forward, backward, (f"residuals layers.{stage}",)))
            data.append(DataEdge(backward, NodeId(f"update g{stage}", "U"), (f"gradient layers.{stage}",)))
            if stage + 1 < stages:
                _transfer(nodes, data, forward, forward._replace(op=f"layers.{stage + 1}", PP=stage + 1), f"y.{stage}")
            if stage:
                _transfer(
                    nodes, data, backward, backward._replace(op=f"layers.{stage - 1}", PP=stage - 1), f"d y.{stage - 1}"
                )
    return Dag(
        nodes=nodes,
        data=tuple(data),
        slots=_slots(schedule, stages, microbatches),
        num_microbatches=microbatches,
        **_tables(stages, microbatches, devices_per_stage),
    )


def _transfer(nodes: dict[NodeId, Node], data: list[DataEdge], src: NodeId, dst: NodeId, value: str) -> None:
    here, there = f"g{src.PP}", f"g{dst.PP}"
    send, recv = (src._replace(op=f"{word} {value}>{there}") for word in ("send", "recv"))
    nodes[send] = Send(id=send, group=here, peer=there, values=(value,), match=recv)
    nodes[recv] = Recv(id=recv, group=there, peer=here, values=(value,), match=send)
    data += [DataEdge(src, send, (value,)), DataEdge(send, recv, (value,)), DataEdge(recv, dst, (value,))]


def _slots(schedule: Schedule, stages: int, microbatches: int) -> tuple[Slot, ...]:
    return tuple(
        Slot(group=f"g{stage}", nodes=(NodeId(f"layers.{stage}", PASS, PP=stage, MB=mb),))
        for stage in range(stages)
        for PASS, mb in schedule(stage, stages, microbatches)
    )


def _tables(stages: int, microbatches: int, devices: int) -> dict[str, dict[str, object]]:
    whole = microbatches * devices
    names: Sequence[str] = [f"layers.{stage}" for stage in range(stages)]
    values = [f"{prefix}y.{stage}" for stage in range(stages - 1) for prefix in ("", "d ")]
    leaf = Leaf(path="kernel", shape=(512, 512), dtype="float32", kind="trainable", nbytes=PARAMETER)
    return {
        "ops": {
            name: Op(
                name=name, units=(stage,), PP=stage, path=name, source=f"model.py:{10 + stage}", reads=(name,),
                flops_forward=10**12, flops_backward_input=10**12, flops_backward_weight=10**12,
                residual_bytes=RESIDUAL * whole,
            )
            for stage, name in enumerate(names)
        },
        "values": {
            name: Value(name=name, shape=(whole, 1024), batch_dim=0, nbytes=ACTIVATION * whole) for name in values
        },
        "buckets": {name: Bucket(name=name, leaves=(leaf,), optimizer_bytes=OPTIMIZER) for name in names},
        "groups": {
            f"g{stage}": DeviceGroup(
                name=f"g{stage}",
                devices=tuple(range(stage * devices, (stage + 1) * devices)),
                axes=(("data", devices),),
            )
            for stage in range(stages)
        },
    }  # fmt: skip
