"""Which state a pass of an operation reads."""

from __future__ import annotations

from piper_jax.ir.nodes import Bucket, Leaf, Op

PASSES = ("F", "B", "BI", "BW")


def leaves_read(op: Op, PASS: str | None, bucket: Bucket) -> tuple[Leaf, ...]:
    """The leaves of ``bucket`` that one pass of ``op`` reads: in F all, in B, BI and BW those that its results need.

    None of a bucket that only lies with ``op``.
    """
    halves = {"B": (op.input_reads, op.weight_reads), "BI": (op.input_reads,), "BW": (op.weight_reads,)}.get(
        PASS or "F"
    )
    if bucket.name not in op.reads or bucket.unread:
        return ()
    if halves is None or (op.input_reads is None and PASS != "BW"):
        return bucket.leaves
    paths = {path for half in halves if half is not None for path in half.leaves}
    return tuple(leaf for leaf in bucket.leaves if leaf.path in paths)
