"""Sends and receives for the data edges that cross groups."""

from __future__ import annotations

from dataclasses import replace

from piper_jax.ir.dag import Dag
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import DataEdge, Node, Recv, Send, Update


def with_transfers(dag: Dag) -> Dag:
    """Adds one send and one receive for each producer and each other group that reads from it.

    The pair carries all that the group needs from that producer, once. Gradients on their way to updates are reduced,
    not sent. ::

        g0: F layers.0  --x-->  g1: F layers.1, F layers.2
        -->  g0: F layers.0 --> send layers.0>g1  -->  g1: recv layers.0>g1 --> F layers.1, F layers.2
    """
    group_of = {name: node.group for name, node in dag.nodes.items()}
    updates = {name for name, node in dag.nodes.items() if isinstance(node, Update)}
    crossing: dict[NodeId, dict[str, dict[NodeId, tuple[str, ...]]]] = {}
    data: list[DataEdge] = []
    for edge in dag.data:
        target = group_of[edge.dst]
        if edge.dst in updates or target is None or target == group_of[edge.src]:
            data.append(edge)
        else:
            consumers = crossing.setdefault(edge.src, {}).setdefault(target, {})
            consumers[edge.dst] = (*consumers.get(edge.dst, ()), *edge.values)
    if not crossing:
        return dag
    nodes: dict[NodeId, Node] = {}
    for name, node in dag.nodes.items():
        nodes[name] = node
        for target, consumers in crossing.get(name, {}).items():
            values = tuple(dict.fromkeys(value for needed in consumers.values() for value in needed))
            _, pass_, stage, expert, microbatch = name
            send = NodeId(f"send {name.op}>{target}", pass_, stage, expert, microbatch)
            recv = NodeId(f"recv {name.op}>{target}", pass_, stage, expert, microbatch)
            nodes[send] = Send(id=send, group=node.group, peer=target, values=values, match=recv)
            nodes[recv] = Recv(id=recv, group=target, peer=node.group or "", values=values, match=send)
            data += (DataEdge(name, send, values), DataEdge(send, recv, values))
            data += (DataEdge(recv, consumer, needed) for consumer, needed in consumers.items())
    return replace(dag, nodes=nodes, data=tuple(data))
