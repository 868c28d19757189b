"""DAGs as a trace would make them, built by hand: tests of the core need no model and no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from piper_jax.ir.dag import Coupling, Dag
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Bucket, Compute, DataEdge, Layered, Leaf, Node, Op, Update, Value
from piper_jax.planning import Plan, Unbound

ROWS = 64
LEAF_BYTES = 4096


def op(name: str, PP: int, **fields: object) -> Op:
    """An operation that reads one bucket of its own name, unless ``reads`` says otherwise."""
    costs = {"flops_forward": 100, "flops_backward_input": 100, "flops_backward_weight": 100, "residual_bytes": 8192}
    return Op(**{"name": name, "units": (PP,), "PP": PP, "path": name, "reads": (name,), **costs, **fields})


def traced(
    ops: Sequence[Op],
    flows: Sequence[tuple[str, str, str]],
    *,
    rows: int = ROWS,
    frozen: Sequence[str] = (),
    couplings: int = 0,
) -> Plan:
    """A traced plan: one F and one B per operation, one update per trainable bucket.

    Args:
      ops: in trace order.
      flows: (producer, consumer, value) of the forward pass; the backward pass mirrors them.
      rows: rows of the batch.
      frozen: buckets whose leaves are constant.
      couplings: how many times the optimizer mixes groups.
    """
    names = list(dict.fromkeys(bucket for o in ops for bucket in o.reads))
    kind = {name: "constant" if name in frozen else "trainable" for name in names}
    buckets = {
        name: Bucket(
            name=name,
            leaves=(Leaf(path=f"{name}.kernel", shape=(32, 32), dtype="float32", kind=kind[name], nbytes=LEAF_BYTES),),
            optimizer_bytes=0 if name in frozen else 2 * LEAF_BYTES,
        )
        for name in names
    }
    trainable = [name for name in names if kind[name] == "trainable"]
    forward = {o.name: NodeId(o.name, "F", o.PP, o.EP) for o in ops}
    backward = {o.name: NodeId(o.name, "B", o.PP, o.EP) for o in reversed(ops) if o.has_backward}
    updates = {name: NodeId(f"update {name}", "U") for name in trainable}
    nodes: dict[NodeId, Node] = {n: Compute(id=n) for n in (*forward.values(), *backward.values())}
    nodes |= {node: Update(id=node, buckets=(name,)) for name, node in updates.items()}
    data = [DataEdge(forward[a], forward[b], (v,)) for a, b, v in flows]
    data += [DataEdge(forward[name], b, (f"residuals {name}",)) for name, b in backward.items()]
    data += [DataEdge(backward[b], backward[a], (f"d {v}",)) for a, b, v in flows if {a, b} <= set(backward)]
    for o in ops:
        if o.has_backward:
            data += [DataEdge(backward[o.name], updates[r], (f"gradient {r}",)) for r in o.reads if r in updates]
    return Plan(
        dag=Dag(
            nodes=nodes,
            data=tuple(data),
            ops={o.name: o for o in ops},
            values=_values(ops, flows, rows),
            buckets=buckets,
            couplings=tuple(Coupling(round=k, buckets=tuple(trainable), nbytes=4) for k in range(couplings)),
        ),
        source=Unbound(fingerprint="hand-built"),
    )


def _values(ops: Sequence[Op], flows: Sequence[tuple[str, str, str]], rows: int) -> dict[str, Value]:
    values = [
        Value(name=name, shape=(rows, 16), batch_dim=0, nbytes=rows * 64) for _, _, v in flows for name in (v, f"d {v}")
    ]
    values += [Value(name=f"residuals {o.name}", nbytes=o.residual_bytes) for o in ops]
    return {value.name: value for value in values}


def chain(num_units: int, *, rows: int = ROWS, **fields: object) -> Plan:
    """Equal layers, one after another."""
    ops = [op(f"layers.{i}", i, **fields) for i in range(num_units)]
    return traced(ops, [(f"layers.{i}", f"layers.{i + 1}", f"add.{i}") for i in range(num_units - 1)], rows=rows)


def stacked(length: int) -> Plan:
    """The same, of which all parameters are one of the user's, ``layers.kernel [length, 32, 32]``."""
    plan = chain(length)
    whole = Layered(path="layers.kernel", dim=0, count=length)
    buckets = {
        name: replace(bucket, leaves=tuple(replace(leaf, layered=whole) for leaf in bucket.leaves))
        for name, bucket in plan.dag.buckets.items()
    }
    return replace(plan, dag=replace(plan.dag, buckets=buckets))


def tied(num_units: int) -> Plan:
    """Layers of which the first and the last share one parameter, such as an embedding."""
    ops = [op(f"layers.{i}", i) for i in range(num_units)]
    for i in (0, num_units - 1):
        ops[i] = op(f"layers.{i}", i, reads=("embedding", f"layers.{i}"))
    return traced(ops, [(f"layers.{i}", f"layers.{i + 1}", f"add.{i}") for i in range(num_units - 1)])


def experts(num_layers: int) -> Plan:
    """Layers of a gate, an expert region and a combination with a skip around the experts."""
    ops: list[Op] = []
    flows: list[tuple[str, str, str]] = []
    for i in range(num_layers):
        gate, expert, combine = f"layers.{i}.gate", f"layers.{i}.experts", f"layers.{i}.combine"
        ops += [op(gate, i), op(expert, i, EP=0), op(combine, i)]
        flows += [(gate, expert, f"dispatch.{i}"), (expert, combine, f"expert.{i}"), (gate, combine, f"skip.{i}")]
        if i:
            flows.append((f"layers.{i - 1}.combine", gate, f"add.{i - 1}"))
    return traced(ops, flows)
