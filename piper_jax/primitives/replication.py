"""``replicate``: data parallelism, and its memory-saving forms ZeRO-1, 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from piper_jax.arguments import require_fields
from piper_jax.errors import DirectiveError, suggest
from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import Filter
from piper_jax.ir.forward import Rewritten
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Bucket, Replication
from piper_jax.ir.selection import keep_index, select

OPTIONS = tuple(f.name for f in fields(Replication) if f.name != "axes")
MESH_AXES = ("data", "expert", "tensor")


def replicate(dag: Dag, filter: Filter, *, axes: str | Sequence[str] = ("data",), **options: object) -> Rewritten:
    """Replicates the parameters that the selected nodes read over ``axes``, and reduces their gradients.

    Only attributes of state buckets are set; completion derives from them the fewest collectives, once, so the
    directive may come before or after ``order``. ::

        B[MB=0] layers.0, B[MB=1] layers.0 --> U update layers.0
        -->  replicate(where(), axes=("data",))
        B[MB=0] layers.0, B[MB=1] layers.0 --> all_reduce gradient layers.0 --> U update g0

        -->  replicate(where(), axes=("data",), shard_optimizer=True)         ZeRO-1, as optimizer states are sharded
        B ... --> reduce_scatter gradient --> U update g0 --> all_gather parameters
        -->  ... shard_grads=True, reduce_every="microbatch"                  ZeRO-2
        B[MB=0] --> reduce_scatter, B[MB=1] --> reduce_scatter --> U update g0 --> all_gather parameters
        -->  ... shard_params=True                                            ZeRO-3, also called FSDP
        all_gather parameters --> F, B ... --> reduce_scatter --> U update g0

    Args:
      dag: the plan's DAG.
      filter: nodes whose operations' state is meant.
      axes: mesh axes; the axis over which experts are sharded is left out for their parameters.
      **options: shard_optimizer, shard_grads, shard_params (each implies the one before it); bucket_bytes, up to which
        neighbouring buckets share one collective; reduce_every ``"step"``, ``"microbatch"`` or a number of microbatches
        (the latter two with shard_grads); gather_distance, how many uses ahead parameters are gathered; reduce_stream,
        gather_stream.

    Raises:
      DirectiveError: an unknown option or axis, no state, or state that is replicated in another way already.
    """
    replication = _replication(axes, options)
    read = {bucket for node in select(dag, filter) for bucket in _state(dag, node)}
    if not read:
        raise DirectiveError(f"no node of {filter} reads any state.", help="select operations that have parameters.")
    buckets: dict[str, Bucket] = dict(dag.buckets)
    for name in (name for name in dag.buckets if name in read):
        old = buckets[name].replication
        if old is not None and old != replication:
            reader = next(n for n in select(dag, filter) if name in _state(dag, n))
            raise DirectiveError(
                f"state {name} is replicated in another way already.",
                detail=(f"already: {replication_text(old)}", f"now:     {replication_text(replication)}"),
                help="let each parameter be selected by one replicate directive.",
                conflict="replicate",
                node=reader,
            )
        buckets[name] = replace(buckets[name], replication=replication)
    return Rewritten(keep_index(dag, replace(dag, buckets=buckets)))


def replication_text(replication: Replication) -> str:
    """``axes=('data',) shard_params=True``: what differs from the defaults."""
    plain = Replication(axes=replication.axes)
    changed = [name for name in OPTIONS if getattr(replication, name) != getattr(plain, name)]
    return " ".join([f"axes={replication.axes}", *(f"{name}={getattr(replication, name)!r}" for name in changed)])


def _state(dag: Dag, node: NodeId) -> tuple[str, ...]:
    """The buckets that a compute node reads, or the bucket that an update updates."""
    op = dag.ops.get(node.op)
    return op.reads if op is not None else (node.op.removeprefix("update "),)


def _replication(axes: str | Sequence[str], options: Mapping[str, object]) -> Replication:
    for name in options:
        if name not in OPTIONS:
            raise DirectiveError(f"replicate has no option {name!r}.", help=suggest(name, OPTIONS))
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    for axis in axes:
        if axis not in MESH_AXES:
            raise DirectiveError(f"there is no mesh axis {axis!r}.", help=suggest(axis, MESH_AXES))
    if len(set(axes)) < len(axes):
        raise DirectiveError(f"axes={axes} names an axis twice.", help="name each mesh axis once.")
    wanted = Replication(axes=axes, **_with_implied(options))  # pyright: ignore[reportArgumentType]
    require_fields(wanted, DirectiveError)
    _require_meaning(wanted, options)
    return wanted


def _with_implied(options: Mapping[str, object]) -> Mapping[str, object]:
    """The options with what ``shard_params`` and ``shard_grads`` imply."""
    wanted = dict(options)
    for name, implied in (("shard_params", "shard_grads"), ("shard_grads", "shard_optimizer")):
        if wanted.get(name) is True and wanted.setdefault(implied, True) is False:
            raise DirectiveError(f"{name}=True includes {implied}, but {implied}=False.", help=f"leave {implied} out.")
    return wanted


def _require_meaning(wanted: Replication, options: Mapping[str, object]) -> None:
    """Refuses an option that would change nothing."""
    if wanted.reduce_every != "step" and not wanted.shard_grads:
        shown = f'"{wanted.reduce_every}"' if isinstance(wanted.reduce_every, str) else wanted.reduce_every
        raise DirectiveError(
            "gradients that are whole on every device are reduced once per step.",
            help=f"reduce_every={shown} needs shard_grads=True.",
        )
    for name, needed in (("gather_distance", "shard_params"), ("gather_stream", "shard_optimizer")):
        if name in options and not getattr(wanted, needed):
            raise DirectiveError(
                f"{name}={options[name]!r} means nothing, as parameters are not gathered here.",
                help=f"{name} needs {needed}=True.",
            )
