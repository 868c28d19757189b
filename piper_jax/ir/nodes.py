"""The closed set of node classes, and the static tables that nodes refer to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from piper_jax.hints import From, Name
from piper_jax.ir.ids import NodeId

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
LeafKind = Literal["trainable", "mutable", "constant"]
Carry = Literal["sequential", "equal", "sum", "mean"]
Way = Literal["enter", "leave"]
Every = Literal["step", "microbatch"] | Annotated[int, From(1)]
Count = Annotated[int, From(0)]


# -- nodes: one per device group, never per device ------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """One pass (F, B, BI or BW) of one operation for one microbatch on one group."""

    id: NodeId
    group: str | None = None
    stream: Name = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The optimizer update of state buckets on one of their owner groups, once per step.

    ``round``: updates that mix groups (a global norm) run in rounds with a small reduction in between; most have only
    round 0.
    """

    id: NodeId
    group: str | None = None
    stream: Name = "compute"
    buckets: tuple[str, ...] = ()
    round: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Values leave ``group`` for ``peer``; ``match`` is the Recv there."""

    id: NodeId
    group: str | None = None
    stream: str = "send"
    peer: str
    values: tuple[str, ...]
    match: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Recv:
    """Values from ``peer`` arrive on ``group``; ``match`` is the Send there."""

    id: NodeId
    group: str | None = None
    stream: str = "recv"
    peer: str
    values: tuple[str, ...]
    match: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective over mesh ``axes`` of ``group`` (an empty ``axes`` means all devices of the group).

    ``values`` are names of ``Dag.values``; ``bucket`` names the state that is gathered or reduced, if it is state. An
    all_to_all is ``around`` an operation, on what enters or leaves it.
    """

    id: NodeId
    group: str | None = None
    stream: Name = "compute"
    kind: CollectiveKind
    axes: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    bucket: str | None = None
    around: str | None = None
    way: Way | None = None


Node = Compute | Update | Send | Recv | Collective


# -- static tables ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What one half of a backward reads, apart from the batch and from residuals that its own forward computed.

    Attributes:
      leaves: paths of state leaves.
      values: names of values of other operations, and, where BW reads them, of incoming cotangents.
    """

    leaves: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """What a compute node computes, shared by its passes and microbatches. Costs are of the WHOLE batch.

    Attributes:
      name: unique, from module paths, such as ``"layers.0-1"``.
      units: indices of the traced units (regions or automatic cut points) merged into it, ascending.
      PP, EP: region coordinates, None outside of such regions.
      path, source: module path and ``file.py:line`` for messages.
      flops_forward, flops_backward_input, flops_backward_weight: floating-point operations.
      residual_bytes: kept from forward for backward: saved intermediates and the values of other operations that the
        backward reads, without parameters and batch inputs.
      kept_bytes, crossing_bytes: kept from BI for BW: of what BI reads, and of what it computes. By default all
        residuals, and nothing.
      input_reads, weight_reads: what BI reads, and BW; a whole B both. None if unknown: all state is then taken to be
        read by BI, and no value of another operation by either.
      reads: state buckets read or carried.
      batch_inputs: paths of batch leaves read, also by the weight of its loss.
      carries: buckets of mutable state whose next value its forward gives.
      has_backward: False where nothing trainable is upstream.
      splittable: BI and BW can be separate.  whole_because: why not.
      kept_whole: an order lists its BI and BW, and has its B in place of BI, since it is not splittable.
      remat: name of a ``jax.checkpoint`` policy, or None to save all residuals.
      row_bound: for experts that take rows: how many of a slice one device takes, as a multiple of an equal share.
      shard_axis: mesh axis over which the region's experts are sharded, or None.
      replica_means: all_reduces over the replicas inside each forward and each backward (``mean_over_replicas``); they
        are no nodes of their own, since they would cut the operation in two.
      needs_weight: its terms of the loss are divided by a weight that the whole batch gives (``WeightedLoss``).
    """

    name: str
    units: tuple[Count, ...] = ()
    PP: Count | None = None
    EP: Count | None = None
    path: str = ""
    source: str = ""
    flops_forward: Count = 0
    flops_backward_input: Count = 0
    flops_backward_weight: Count = 0
    residual_bytes: Count = 0
    kept_bytes: Count | None = None
    crossing_bytes: Count = 0
    input_reads: Reads | None = None
    weight_reads: Reads | None = None
    reads: tuple[str, ...] = ()
    carries: tuple[str, ...] = ()
    batch_inputs: tuple[str, ...] = ()
    has_backward: bool = True
    splittable: bool = True
    whole_because: str = ""
    kept_whole: bool = False
    remat: str | None = None
    row_bound: float | None = None
    shard_axis: str | None = None
    shard_stream: Name = "compute"
    replica_means: tuple[Count, Count] = (0, 0)
    needs_weight: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations of all its passes."""
        return self.flops_forward + self.flops_backward_input + self.flops_backward_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A named array at global shape. ``batch_dim`` is the dim that microbatches and replicas divide, or None.

    Names: ``dot_general.57`` (equation of the trace), ``d dot_general.57`` (its cotangent), ``residuals layers.0``,
    ``gradient BUCKET``, ``parameters BUCKET``, ``state BUCKET``, ``carried BUCKET``, ``batch LEAF``.
    """

    name: str
    shape: tuple[Count, ...] = ()
    dtype: str = "float32"
    batch_dim: Count | None = None
    nbytes: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layered:
    """A parameter as the user has it, of which each layer is a leaf: its path, and ``count`` layers on ``dim``."""

    path: str
    dim: Count
    count: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One logical leaf of the model's state: path in the model, shape, dtype, kind.

    ``carry`` says how a leaf that the loss function changes goes from step to step. ``sequential``: each microbatch
    sees what the one before it left, and replicas are averaged at the end of a step; ``equal``: the same, but no batch
    changes it, so that replicas agree by themselves; ``sum`` and ``mean``: every slice sees the value of the step's
    start, and the next one is the sum or the mean of what all slices left.

    ``axis_names`` are those of the model's own partitioning metadata, one for each dimension, or none at all;
    ``tensor_dim`` is the dimension that the tensor axis divides; ``layered`` is what the leaf is one layer of.
    """

    path: str
    shape: tuple[Count, ...]
    dtype: str
    kind: LeafKind
    nbytes: Count
    carry: Carry | None = None
    axis_names: tuple[str | None, ...] = ()
    tensor_dim: Count | None = None
    layered: Layered | None = None

    @property
    def given_path(self) -> str:
        """The path of the user's own parameter."""
        return self.path if self.layered is None else self.layered.path

    @property
    def given_shape(self) -> tuple[int, ...]:
        """The shape of the user's own parameter."""
        at = len(self.shape) if self.layered is None else self.layered.dim
        return (*self.shape[:at], *(() if self.layered is None else (self.layered.count,)), *self.shape[at:])

    def given_dim(self, dim: int) -> int:
        """A dimension of the leaf as one of the user's own parameter."""
        return dim + (self.layered is not None and dim >= self.layered.dim)

    @property
    def sum_dtype(self) -> str:
        """The dtype in which what slices leave of it is summed: of floats, 32 bits at least."""
        return self.gradient_dtype if "float" in self.dtype or "complex" in self.dtype else self.dtype

    @property
    def gradient_dtype(self) -> str:
        """The dtype in which its gradients are summed: 32 bits at least."""
        return self.dtype if self.dtype in ("float64", "complex64", "complex128") else "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """How a bucket is replicated over ``axes``: plain data parallelism, or ZeRO-1/2/3 by the shard_* flags.

    ``reduce_every``: gradients are reduced once per step, after each microbatch, or after that many microbatches.
    """

    axes: tuple[str, ...] = ("data",)
    shard_optimizer: bool = False
    shard_grads: bool = False
    shard_params: bool = False
    bucket_bytes: Annotated[int, From(1)] | None = None
    reduce_every: Every = "step"
    gather_distance: Count = 1
    reduce_stream: Name = "compute"
    gather_stream: Name = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """State leaves with the same readers, owned, reduced and updated together.

    The owners are the groups whose compute nodes read it, in group order: several for tied weights and for stages that
    a two-way schedule keeps twice. ``optimizer_bytes`` is the optimizer state of these leaves. ``elementwise``: the
    optimizer updates them element by element, so ZeRO updates flat shards; others are gathered for the update.
    ``unread``: no pass needs them; they lie with the first operation. ``changed_by``: names of the units, before any
    cut, that give the next value of carried state.
    """

    name: str
    leaves: tuple[Leaf, ...]
    replication: Replication | None = None
    optimizer_bytes: Count = 0
    elementwise: bool = True
    unread: bool = False
    changed_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """A named array of logical device ids, row-major over ``axes`` ((name, size), ...), outermost first.

    A flat tuple of ids means one axis, ``data``.
    """

    name: Name
    devices: tuple[Count, ...]
    axes: tuple[tuple[Name, Annotated[int, From(1)]], ...] = ()


# -- edges --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class DataEdge:
    """Values go straight from their producer to one consumer."""

    src: NodeId
    dst: NodeId
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OrderEdge:
    """``src`` is finished before ``dst`` starts, though no value passes."""

    src: NodeId
    dst: NodeId
    reason: str = "order"
