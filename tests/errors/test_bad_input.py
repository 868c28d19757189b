"""What a user reads after wrong input: what, where and the fix, in at most 12 lines, before anything is compiled."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import piper_jax as piper
from piper_jax import Strategy, directive, where
from piper_jax.errors import MAX_LINES

ROWS, DIM = 16, 4
CASES: dict[str, tuple[Callable[[], object], type[piper.PiperError], str]] = {}


def case(error: type[piper.PiperError], message: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """The whole message, dedented; line numbers are written as LINE."""

    def register(function: Callable[[], object]) -> Callable[[], object]:
        CASES[function.__name__] = (function, error, textwrap.dedent(message).strip("\n"))
        return function

    return register


# -- a model that works ---------------------------------------------------------------------------------------
def params(layers: int = 4, dim: int = DIM) -> list[Any]:
    return [jnp.eye(dim) * 0.5 for _ in range(layers)]


def batch(rows: int = ROWS, dim: int = DIM) -> dict[str, Any]:
    return {"x": np.ones((rows, dim), np.float32)}


def apply(kernels: Any, batch: Any) -> Any:
    x = batch["x"]
    for kernel in kernels:
        with piper.annotate("PP"):
            x = jnp.tanh(x @ kernel)
    return x


def loss(kernels: Any, batch: Any) -> Any:
    return apply(kernels, batch).mean()


def parallelized(loss_fn: Any = loss, *, rows: int = ROWS, devices: Any = None, **degrees: Any) -> piper.Train:
    return piper.parallelize(
        loss_fn, params(), batch(rows), optimizer=optax.sgd(0.1), strategy=Strategy(**degrees), devices=devices
    )


def traced() -> piper.Plan:
    return piper.trace(loss, params(), batch(), optimizer=optax.sgd(0.1)).cut(stages=2)


# -- arguments of the wrong kind ---------------------------------------------------------------------------------
@case(
    piper.DirectiveError,
    """
    Strategy has no 'data_paralel'.
    help: did you mean 'data_parallel'?
""",
)
def misspelt_degree():
    Strategy(data_paralel=2)  # type: ignore[call-arg]


@case(
    piper.TraceError,
    """
    trace: loss_fn is a list, no function.
    help: trace(loss_fn, params, batch).
""",
)
def loss_that_is_no_function():
    piper.trace(params(), loss, batch())  # type: ignore[arg-type]


@case(
    piper.TraceError,
    """
    trace: optimizer is a float, without init and update.
    help: pass an optax.GradientTransformation such as optax.adamw(1e-3).
""",
)
def optimizer_that_is_a_number():
    piper.trace(loss, params(), batch(), optimizer=1e-3)


@case(
    piper.RuntimeFault,
    """
    compile: devices=[0, 1] are no JAX devices.
    help: devices=jax.devices().
""",
)
def devices_by_number():
    parallelized(devices=[0, 1], data_parallel=2)


@case(
    piper.RuntimeFault,
    """
    compile: devices is a map of other groups than this plan's.
    help: DeviceMap.of(plan, jax.devices()).
""",
)
def map_of_another_plan():
    two, four = (traced().apply(piper.Strategy(data_parallel=n, pipeline_parallel=2)) for n in (2, 4))
    piper.compile(two, devices=piper.DeviceMap.of(four, jax.devices()))


@case(
    piper.RuntimeFault,
    """
    step: called inside a JAX transformation.
    help: train.step runs compiled programs on many devices; call it from Python, without jax.jit or grad.
""",
)
def step_inside_jit():
    train = parallelized()
    state = train.init(params())
    jax.jit(lambda b: train.step(state, b))(batch())


@case(
    piper.RuntimeFault,
    """
    step: batch leaf x is a scalar.
    help: pass arrays [batch, ...], as traced.
""",
)
def scalar_in_place_of_rows():
    train = parallelized()
    train.step(train.init(params()), {"x": 1.0})


# -- the batch --------------------------------------------------------------------------------------------------
@case(
    piper.DirectiveError,
    """
    split[1] at one_f_one_b.py:LINE: 18 rows of tanh.1 (18, 4) are not divisible by 4 microbatches.
    help: nearest legal numbers of microbatches: 2, 3, 6.
""",
)
def batch_not_divisible_into_microbatches():
    parallelized(rows=18, pipeline_parallel=2, data_parallel=2, num_microbatches=4)


@case(
    piper.PlanError,
    """
    batch-divides: 20 rows of tanh.1 are not divisible by 4 microbatches x 2 replicas of g0.
    help: use a batch of 16 rows, or other degrees.
""",
)
def batch_not_divisible_over_replicas():
    parallelized(rows=20, pipeline_parallel=2, data_parallel=2, num_microbatches=4)


@case(
    piper.TraceError,
    """
    trace: leaves of the batch differ in dimension 0, the batch dimension.
        x: 16
        y: 8
    help: put the batch on dimension 0 of every leaf; broadcast constants inside the loss function.
""",
)
def leaves_of_different_sizes():
    piper.trace(loss, params(), {"x": np.ones((16, DIM)), "y": np.ones(8)})


@case(
    piper.TraceError,
    """
    trace: the batch holds no array with a batch dimension.
    help: pass arrays [batch, ...].
""",
)
def no_batch_dimension():
    piper.trace(lambda p, b: p[0].sum() * b, params(), 3.0)


# -- the loss ---------------------------------------------------------------------------------------------------
@case(
    piper.TraceError,
    """
    trace: the loss is float32[16], not a floating-point scalar.
    help: reduce it, for example with .mean(), or return (loss, aux) with a scalar loss.
""",
)
def loss_not_scalar():
    piper.trace(lambda p, b: apply(p, b).mean(-1), params(), batch())


@case(
    piper.TraceError,
    """
    trace: the loss is int32[], not a floating-point scalar.
    help: reduce it, for example with .mean(), or return (loss, aux) with a scalar loss.
""",
)
def loss_of_integers():
    piper.trace(lambda p, b: (apply(p, b) > 0).sum(), params(), batch())


@case(
    piper.TraceError,
    """
    trace: the weight of the WeightedLoss depends on parameters.
    help: compute it from the batch alone, for example from the padding mask.
""",
)
def weight_that_depends_on_parameters():
    piper.trace(lambda p, b: piper.WeightedLoss(apply(p, b).sum(), apply(p, b).sum()), params(), batch())


@case(
    piper.TraceError,
    """
    trace: nothing in the loss depends on both the parameters and the batch.
    help: the loss function must use its first two arguments.
""",
)
def loss_without_parameters():
    piper.trace(lambda p, b: b["x"].mean(), params(), batch())


@case(
    piper.TraceError,
    """
    trace: the model computes something else for a batch of 32 rows, from `cos` at the loss function on.
    help: its Python code branches on the batch size (some libraries do for one row); use jnp.where, or larger slices.
""",
)
def model_that_branches_on_the_batch_size():
    piper.trace(lambda p, b: (jnp.sin if len(b["x"]) > ROWS else jnp.cos)(apply(p, b)).mean(), params(), batch())


@case(
    piper.TraceError,
    """
    annotate("PP") inside `scan` at the loss function cannot be cut yet.
    help: move the region around the whole loop or checkpointed function, or write the layers as a list.
""",
)
def regions_inside_scan():
    def scanned(kernels: Any, batch: Any) -> Any:
        def body(x: Any, kernel: Any) -> Any:
            with piper.annotate("PP"):
                return jnp.tanh(x @ kernel), None

        return jax.lax.scan(body, batch["x"], kernels)[0].mean()

    piper.trace(scanned, jnp.stack(params()), batch())


@case(
    piper.AnnotationError,
    """
    annotate("PP") inside another PP region, at dot_general.
    help: annotate either the layer class or the block around its call, not both.
""",
)
def region_inside_a_region():
    def nested(kernels: Any, batch: Any) -> Any:
        with piper.annotate("PP"):
            return apply(kernels, batch).mean()

    piper.trace(nested, params(), batch())


@case(
    piper.TraceError,
    """
    trace: the parameters (list) hold no floating-point array to train.
    help: pass a pytree of arrays, or an nnx.Module with nnx.Param variables (or wrt=...).
""",
)
def no_parameters():
    piper.trace(loss, [1, 2], batch())


# -- strategies and directives ------------------------------------------------------------------------------------
@case(
    piper.FilterError,
    """
    where(DP=...): unknown coordinate 'DP'.
    help: did you mean 'PP'?
""",
)
def unknown_name_in_a_filter():
    traced().place(where(DP=0), group=0)


@case(
    piper.AnnotationError,
    """
    annotate('PPP'): unknown region tag
    help: did you mean 'PP'?
""",
)
def unknown_tag():
    piper.annotate("PPP")


@case(
    piper.FilterError,
    """
    place[1] at test_bad_input.py:LINE: where(PP=5) matches nothing.
        PP is 0-1; nearest to 5 is 1
    help: name coordinates that exist.
""",
)
def empty_match():
    traced().place(where(PP=5), group=0)


@case(
    piper.DirectiveError,
    """
    place[2] at test_bad_input.py:LINE: B[PP=0] 0-1 is on d0 already, and cannot be on d1 too.
        by place(where(PP=0), group=0, stream='compute') at test_bad_input.py:LINE
        and place(where(PP=0, PASS="B"), group=1, stream='compute') at test_bad_input.py:LINE
    help: let each node be selected by one place directive; name MB to split microbatches between groups.
""",
)
def node_placed_twice():
    traced().place(where(PP=0), group=0).place(where(PP=0, PASS="B"), group=1)


@case(
    piper.DirectiveError,
    """
    order[3] at test_bad_input.py:LINE: B[PP=0] 0-1 before F[PP=0] 0-1 closes a cycle.
        F[PP=0] 0-1
          -> data  B[PP=0] 0-1
        > -> order F[PP=0] 0-1  (this directive)
    help: list F[PP=0] 0-1 first.
""",
)
def cyclic_order():
    plan = traced().place(where(PP=0), group=0).place(where(PP=1), group=1)
    plan.order([where(PP=0, PASS="B"), where(PP=0, PASS="F")])


@case(
    piper.DirectiveError,
    """
    cut[0] at one_f_one_b.py:LINE: the model has 4 units, too few for 5 stages.
    help: use 1 to 4 stages, or annotate more regions.
""",
)
def more_stages_than_units():
    parallelized(pipeline_parallel=5, num_microbatches=2)


@case(
    piper.DirectiveError,
    """
    there is no strategy '1F1BB'.
    help: did you mean '1F1B'?
""",
)
def unknown_strategy():
    parallelized(pipeline_parallel=2, directives=(directive("1F1BB"),))


@case(
    piper.DirectiveError,
    """
    two schedules: directive('1F1B') and directive('GPipe').
    help: a schedule orders everything; name one.
""",
)
def two_schedules():
    parallelized(pipeline_parallel=2, directives=(directive("1F1B"), directive("GPipe")))


@case(
    piper.PlanError,
    """
    4 nodes have no group yet, the first is F[PP=0] 0-1.
    help: call plan.place(where(PP=0), group=...), or plan.apply(strategy).
""",
)
def plan_without_placement():
    piper.compile(traced())


# -- devices ------------------------------------------------------------------------------------------------------
@case(
    piper.RuntimeFault,
    """
    compile: group g3 needs logical device 3; only 3 are given.
    help: pass more devices, or lower data_parallel or pipeline_parallel; planning and simulation need none.
""",
)
def too_few_devices():
    parallelized(pipeline_parallel=4, data_parallel=1, num_microbatches=4, devices=jax.devices()[:3])


# -- after compiling: nothing runs --------------------------------------------------------------------------------
def small() -> piper.Train:
    return parallelized(num_microbatches=2)


@case(
    piper.TraceError,
    """
    init: these parameters are not those of the traced model.
        missing: 3
    help: pass the same pytree (or module) structure that was traced, or trace again.
""",
)
def parameters_of_another_model():
    small().init(params(layers=3))


@case(
    piper.TraceError,
    """
    init: 0 is float32[5, 5], but float32[4, 4] was traced.
    help: pass parameters of the traced shapes and dtypes, or trace again.
""",
)
def parameters_of_another_shape():
    small().init(params(dim=5))


@case(
    piper.RuntimeFault,
    """
    step: batch leaf x is int32[16, 4], but float32[16, 4] is expected.
    help: only dimension 0 may differ from the traced batch; cast, or trace again.
""",
)
def batch_leaf_of_another_dtype():
    train = small()
    train.step(train.init(params()), {"x": np.ones((ROWS, DIM), np.int32)})


@case(
    piper.TraceError,
    """
    step: the batch has another structure than the traced one.
        traced: PyTreeDef({'x': *})
        given:  PyTreeDef((*,))
    help: pass a batch of the traced structure, or trace again.
""",
)
def batch_of_another_structure():
    train = small()
    train.step(train.init(params()), (np.ones((ROWS, DIM), np.float32),))


@case(
    piper.RuntimeFault,
    """
    step: expected the state that train.init returned, got list.
    help: state = train.init(params); state, metrics = train.step(state, batch)
""",
)
def parameters_in_place_of_the_state():
    small().step(params(), batch())  # type: ignore[arg-type]


# -- tests --------------------------------------------------------------------------------------------------------
AFTER_COMPILING = {
    "parameters_of_another_model",
    "parameters_of_another_shape",
    "batch_leaf_of_another_dtype",
    "batch_of_another_structure",
    "parameters_in_place_of_the_state",
    "step_inside_jit",
    "scalar_in_place_of_rows",
}


@pytest.fixture
def num_lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels of the programs that were given to the compiler."""
    from piper_jax.lowering.programs import Compiler

    seen: list[str] = []
    compile_ = Compiler.compile

    def counted(self: Compiler, *args: Any, label: str, **options: Any) -> Any:
        seen.append(label)
        return compile_(self, *args, label=label, **options)

    monkeypatch.setattr(Compiler, "compile", counted)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_message(name: str, num_lowered: list[str]) -> None:
    function, error, message = CASES[name]
    with pytest.raises(piper.PiperError) as caught:
        function()
    assert re.sub(r"(test_bad_input|one_f_one_b)\.py:\d+", r"\1.py:LINE", str(caught.value)) == message
    assert type(caught.value) is error
    assert len(message.splitlines()) <= MAX_LINES
    assert not num_lowered or name in AFTER_COMPILING


def test_microbatches_have_a_default() -> None:
    """Twice the pipeline degree; a batch that this does not divide is told so."""
    assert parallelized(pipeline_parallel=2).plan.num_microbatches == 4
    with pytest.raises(piper.DirectiveError, match="not divisible by 4 microbatches"):
        parallelized(rows=18, pipeline_parallel=2)
