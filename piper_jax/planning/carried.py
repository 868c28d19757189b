"""State that steps carry on: what the slices of a step left is reduced over its replicas and owners."""

from __future__ import annotations

from dataclasses import replace

from piper_jax.ir.carried import givers, reduced_carries
from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import DataEdge, Value
from piper_jax.ir.ownership import Ownership
from piper_jax.planning.updates import collective


def with_carried_state(dag: Dag) -> Dag:
    """Adds one all_reduce a step of all carried state with the same owners and dtype. ::

    F[MB=0] norm, F[MB=1] norm  -->  F[MB=0] norm, F[MB=1] norm --> all_reduce carried mutable norm

    What no batch changes is equal on all replicas, and is not reduced.
    """
    together: dict[tuple[object, ...], list[Ownership]] = {}
    for bucket, owned in reduced_carries(dag).items():
        key = owned.owners, owned.axes, dag.buckets[bucket].leaves[0].sum_dtype
        together.setdefault(key, []).append(owned)
    if not together:
        return dag
    nodes, data, values, groups = dict(dag.nodes), list(dag.data), dict(dag.values), dict(dag.groups)
    for bundle in together.values():
        node = collective("all_reduce", "carried", bundle, "compute", "F")
        nodes[node.id] = node
        groups.setdefault(bundle[0].group.name, bundle[0].group)
        for name, leaves in ((o.bucket, dag.buckets[o.bucket].leaves) for o in bundle):
            value = f"carried {name}"
            values[value] = Value(name=value, nbytes=sum(leaf.nbytes for leaf in leaves))
            data += [DataEdge(giver, node.id, (value,)) for giver in givers(dag, name)]
    return replace(dag, nodes=nodes, data=tuple(data), values=values, groups=groups)
