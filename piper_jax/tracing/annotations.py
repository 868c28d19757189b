"""What a model author writes: regions, degrees, expert regions, replica means, weighted losses, metric reductions."""

from __future__ import annotations

import contextlib
import functools
import itertools
import numbers
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from piper_jax.arguments import checked, shown
from piper_jax.errors import AnnotationError, suggest
from piper_jax.tracing.flat import BOUND, REGION_TAGS, REPLICA_MEAN, THOUSANDTHS

DEGREES = (
    "data_parallel", "pipeline_parallel", "expert_parallel", "tensor_parallel", "zero_stage", "num_microbatches",
    "stages",
)  # fmt: skip
NUMBERS = (jax.Array, np.ndarray, np.generic, int, float)
MOST = 1e6  # a larger bound of rows is room for all
USE = "put it above a function or a class, or write: with piper.annotate(...)."
_marks = itertools.count()
_replica_axes: list[tuple[str, ...] | None] = [None]


# -- regions and degrees --------------------------------------------------------------------------
class _Region(contextlib.ContextDecorator):
    def __init__(self, tag: str):
        self.tag = tag

    def __enter__(self) -> None:
        self.scope = jax.named_scope(f"piper:{self.tag}#{next(_marks)}")
        self.scope.__enter__()

    def __exit__(self, *error: object) -> None:
        self.scope.__exit__(*error)

    def _recreate_cm(self) -> _Region:
        return _Region(self.tag)

    def __call__(self, target: Any) -> Any:
        if not callable(target):
            raise AnnotationError(f'annotate("{self.tag}"): {shown(target)} is no function or class.', help=USE)
        if not isinstance(target, type):
            return super().__call__(target)
        target.__call__ = super().__call__(target.__call__)
        return target


def annotate(tag: str | None = None, /, **degrees: Any) -> Any:
    """Marks a region of a model, or gives a model class its degrees of parallelism.

    ``annotate("PP")`` is a context manager, and a decorator of functions and of module classes (whose ``__call__`` it
    wraps). Each entry is one pipeline unit; they are numbered PP=0, 1, 2, ... in order of entry, as traced.

    ``annotate(data_parallel=2, pipeline_parallel=4, ...)`` decorates a module class; ``Strategy.of(cls)`` reads it.

    Before --> after (class decorator)::

        @piper.annotate(data_parallel=2, pipeline_parallel=4)     Strategy.of(Net) ==
        class Net(nnx.Module): ...                          -->   Strategy(data_parallel=2, pipeline_parallel=4)

    Args:
      tag: ``"PP"`` (pipeline unit) or ``"EP"`` (experts; ``expert_region`` is the usual way to write it).
      **degrees: data_parallel, pipeline_parallel, expert_parallel, tensor_parallel >= 1; zero_stage 0..3;
        num_microbatches >= 1; stages, the module paths of each, as in ``Strategy``.

    Raises:
      AnnotationError: an unknown tag or degree, or a value out of range.
    """
    if tag is not None:
        if tag not in REGION_TAGS or degrees:
            fault = f"annotate({tag!r}): " + ("degrees go in a call of their own" if degrees else "unknown region tag")
            raise AnnotationError(fault, help=suggest(str(tag), REGION_TAGS))
        return _Region(tag)
    for name, value in degrees.items():
        if name not in DEGREES:
            raise AnnotationError(f"annotate({name}=...): unknown degree", help=suggest(name, DEGREES))
        if name == "stages":
            degrees[name] = _stages(value)
            continue
        low, high = (0, 3) if name == "zero_stage" else (1, None)
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            legal = f"{low}..{high}" if high is not None else f">= {low}"
            raise AnnotationError(f"annotate({name}={value!r}): not a legal value", help=f"an int {legal}")
    if not degrees:
        raise AnnotationError("annotate() with nothing to annotate", help='annotate("PP") or annotate(data_parallel=2)')

    def decorate(cls: type) -> type:
        if not isinstance(cls, type):
            raise AnnotationError(f"annotate(): {shown(cls)} is no class.", help="put it above the class of a model.")
        cls.__piper_degrees__ = {**getattr(cls, "__piper_degrees__", {}), **degrees}  # type: ignore[attr-defined]
        return cls

    return decorate


def _stages(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(text, str) for text in value):
        raise AnnotationError(
            f"annotate(stages={shown(value)}): not a legal value", help='stages=("layers.0-2", "...")'
        )
    return tuple(value)


@checked(AnnotationError)
def expert_region(fn: Callable[..., Any], expert_dim: int = 0, *, row_bound: float | None = None) -> Callable[..., Any]:
    """Marks ``fn`` as the experts of a mixture: dispatched tensors in and out only.

    Under ``expert_parallel`` each device holds some of the experts, and gets what every other device dispatched to
    them. Results do not depend on it: each slice's tensors are what they are on one device.

    Args:
      fn: applies all experts to ``[experts, capacity, ...]``; its parameters have the experts on dimension 0 too. With
        ``row_bound`` it takes rows ``[rows, ...]`` sorted by expert, and ``sizes [experts]``, how many are of each, as
        ``jax.lax.ragged_dot`` does, and treats every row by itself.
      expert_dim: the dimension of the experts, 0.
      row_bound: for rows: how many of a slice's rows one device takes, as a multiple of an equal share; buffers have
        that size, and more rows are an error. ``math.inf``: room for all.

    Returns:
      A function that computes the same, inside a region with tag EP.

    Raises:
      AnnotationError: another ``expert_dim``, or a bound that is not above 0.
    """
    if expert_dim != 0:
        raise AnnotationError(f"expert_region(expert_dim={expert_dim})", help="transpose so that experts come first")
    real = isinstance(row_bound, numbers.Real | np.number) and not isinstance(row_bound, bool)
    if row_bound is not None and not (real and row_bound > 0):
        raise AnnotationError(f"expert_region(row_bound={row_bound!r})", help="a number above 0, such as 1.5")
    mark = None if row_bound is None else 0 if row_bound > MOST else max(1, round(float(row_bound) * THOUSANDTHS))

    @functools.wraps(fn)
    def region(*args: Any, **kwargs: Any) -> Any:
        with _Region("EP"), jax.named_scope(f"piper:{BOUND}#{mark}") if mark is not None else contextlib.nullcontext():
            return fn(*args, **kwargs)

    return region


# -- statistics of a whole microbatch ----------------------------------------------------------------
def mean_over_replicas(x: Any) -> Any:
    """The mean of ``x`` over all replicas of a microbatch (data x expert); the identity on one device.

    For statistics that a loss or a normalization takes over a whole microbatch: a balance loss, BatchNorm moments. Its
    transpose is the same mean, so gradients do not depend on the layout.

    Args:
      x: a pytree of floating-point arrays, of the same shapes on every replica.
    """
    axes = _replica_axes[-1]
    if axes is None:
        return jax.tree.map(_replica_mean_p.bind, x)
    return jax.lax.pmean(x, axes) if axes else x


@contextlib.contextmanager
def replica_axes(axes: tuple[str, ...]) -> Iterator[None]:
    """Within the block, ``mean_over_replicas`` reduces over the named axes at once instead of being traced."""
    _replica_axes.append(axes)
    try:
        yield
    finally:
        _replica_axes.pop()


_replica_mean_p = core.Primitive(REPLICA_MEAN)
_replica_mean_p.def_impl(lambda x: x)
_replica_mean_p.def_abstract_eval(lambda x: x)
ad.deflinear2(_replica_mean_p, lambda cotangent, _: [_replica_mean_p.bind(cotangent)])
batching.defvectorized(_replica_mean_p)
mlir.register_lowering(_replica_mean_p, lambda ctx, x: [x])


# -- losses and metrics --------------------------------------------------------------------------------
class WeightedLoss(NamedTuple):
    """A loss that is ``sum(total) / sum(weight) + mean(extra)`` over all slices of the batch, exactly.

    The weight of a slice may be 0. Where that of the whole batch is (nothing but padding), the loss is 0 / 0, which is
    NaN, and each gradient is NaN or 0, as XLA drops products with a mask or not; so it is on one device. Give
    ``jnp.maximum(weight, 1e-6)`` for a loss of 0 there, or leave such a batch out.

    Attributes:
      total: scalar, for example the sum of token losses.
      weight: scalar that depends on the batch only, for example the number of tokens that are not padding.
      extra: scalar that is averaged over slices and never divided by weight, such as a balance loss.
    """

    total: Any
    weight: Any
    extra: Any = 0.0


class _Reduction:
    """A metric leaf with an explicit reduction over slices."""

    kind = ""

    def __init__(self, value: Any):
        self.value = value

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        jax.tree_util.register_pytree_node(cls, lambda m: ((m.value,), None), lambda _, children: cls(*children))


class Sum(_Reduction, kind="sum"):
    """A metric summed over slices."""


class Mean(_Reduction, kind="mean"):
    """A metric averaged over slices."""


class Last(_Reduction, kind="last"):
    """A metric of which the last slice's value is kept."""


def loss_parts(result: Any) -> tuple[dict[str, Any], Any]:
    """Splits what a loss function returned into its parts and its auxiliary outputs.

    Returns:
      ``({"loss": scalar}, aux)``, or ``({"total":, "weight":, "extra":}, aux)`` for a WeightedLoss.
    """
    loss, aux = result, None
    if isinstance(result, tuple) and not isinstance(result, WeightedLoss) and len(result) == 2:
        loss, aux = result
    if isinstance(loss, WeightedLoss):
        parts = ((name, getattr(loss, name)) for name in ("total", "weight", "extra"))
        return {name: jnp.asarray(part) if isinstance(part, NUMBERS) else part for name, part in parts}, aux
    return {"loss": loss}, aux
