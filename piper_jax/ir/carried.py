"""Facts about state that the loss function changes and steps carry on."""

from __future__ import annotations

from piper_jax.ir.dag import Dag
from piper_jax.ir.device_groups import REPLICA_AXES
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Bucket, Carry, Compute, Replication
from piper_jax.ir.ownership import Ownership, owners_of, ownership


def carry_of(bucket: Bucket) -> Carry | None:
    """How the leaves of a bucket, which are alike in it, are carried from step to step."""
    return bucket.leaves[0].carry if bucket.leaves else None


def carried(dag: Dag) -> dict[str, Ownership]:
    """Owners of every bucket of carried state, in bucket order; its copies lie on all replicas of them."""
    known = dag.memo.get("carried")
    if known is None:
        owners, everywhere = owners_of(dag), Replication(axes=REPLICA_AXES)
        known = dag.memo["carried"] = {
            name: ownership(dag, name, owners[name], frozenset(), everywhere)
            for name, bucket in dag.buckets.items()
            if owners[name] and carry_of(bucket) is not None
        }
    return known


def reduced_carries(dag: Dag) -> dict[str, Ownership]:
    """Those of which copies differ at the end of a step."""
    return {
        name: owned
        for name, owned in carried(dag).items()
        if owned.num_copies > 1 and carry_of(dag.buckets[name]) != "equal"
    }


def givers(dag: Dag, bucket: str) -> list[NodeId]:
    """The forward passes that leave a new value of a bucket."""
    return [
        name
        for name, node in dag.nodes.items()
        if isinstance(node, Compute) and name.PASS == "F" and bucket in dag.ops[name.op].carries
    ]
