"""What a user reads after arguments, a batch, a loss or devices that cannot be: the whole text; nothing is compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from expected import Expected
from flax import nnx
from small_model import DIM, ROWS, apply, batch, loss, parallelized, params

import piper_jax as piper

expected = Expected(__file__)


# -- state that the loss function changes ----------
class Counter(nnx.Module):
    """Assigns ``value`` to its one variable."""

    def __init__(self, variable: nnx.Variable):
        self.weight = nnx.Param(jnp.ones(DIM))
        self.state = variable

    def loss(self, value: Any, *, whole: bool = False) -> piper.Plan:
        def changing(model: Counter, batch: Any) -> Any:
            new = value(model, batch["x"])
            if whole:
                model.state.set_value(new)
            else:
                model.state[...] = new
            return (batch["x"] * model.weight[...]).mean()

        return piper.trace(changing, self, {"x": np.ones((ROWS, DIM), np.float32)})


@expected(
    piper.TraceError,
    """
    trace: state is int32 and depends on the batch, so replicas leave different values.
    help: carry="sum" adds up what all slices leave; or freeze it (use_running_average=True).
""",
)
def count_of_rows_without_a_policy():
    Counter(nnx.BatchStat(jnp.zeros((), jnp.int32))).loss(lambda model, x: (x > 0).sum())


@expected(
    piper.TraceError,
    """
    trace: state is float32[], and becomes float32[3].
    help: state keeps its shape and dtype from step to step.
""",
)
def state_of_another_shape():
    Counter(nnx.BatchStat(jnp.zeros(()))).loss(lambda model, x: x.mean(0)[:3], whole=True)


@expected(
    piper.TraceError,
    """
    trace: state is trained, and changes inside the loss function.
    help: let the optimizer alone change parameters, or make it another nnx.Variable (wrt=...).
""",
)
def parameter_that_changes():
    Counter(nnx.Param(jnp.zeros(()))).loss(lambda model, x: x.mean())


@expected(
    piper.AnnotationError,
    """
    state: carry='averages'
    help: known: ...
""",
)
def unknown_policy():
    Counter(nnx.BatchStat(jnp.zeros(()), carry="averages")).loss(lambda model, x: x.mean())


@expected(
    piper.TraceError,
    """
    trace: the loss function carries weigth, which is no leaf of the parameters.
    help: such as 0, 1, 2.
""",
)
def carried_path_that_is_none():
    def carrying(params: Any, batch: Any) -> Any:
        return loss(params, batch), {"state": piper.Carried({"weigth": jnp.zeros(())})}

    piper.trace(carrying, params(), batch())


@expected(
    piper.TraceError,
    """
    trace: state is int32, which has no carry="mean", and no batch changes it.
    help: carry="sequential", the default, hands it on from microbatch to microbatch.
""",
)
def mean_of_a_counter():
    Counter(nnx.Variable(jnp.int32(0), carry="mean")).loss(lambda model, x: model.state[...] + 1)


@expected(
    piper.PlanError,
    """
    carried-in-order: state is carried from microbatch to microbatch, but layers.0-1 (g0) and layers.2-3 (g1) read or change it.
        changed by layers.0
    help: read and change it in one stage alone (fewer stages, or stages=[...] that hold it together), or let every slice see the value of the step's start: carry="mean".
""",  # noqa: E501
)
def state_of_two_stages():
    def changing(variables: Any, batch: Any) -> Any:
        y, mean = apply(variables["layers"], batch), variables["state"]
        first = jnp.tanh(batch["x"] @ variables["layers"][0]).mean()
        return (y * mean).mean(), {"state": piper.Carried({"state": 0.9 * mean + 0.1 * first})}

    variables = {"layers": params(), "state": jnp.zeros(())}
    piper.trace(changing, variables, batch()).apply(piper.Strategy(pipeline_parallel=2)).check()


# -- arguments ----------
@expected(
    piper.TraceError,
    """
    trace: loss_fn=<list> is not a function.
    help: loss_fn(params_or_model, batch[, rng]) -> loss | (loss, aux) | WeightedLoss, pure.
""",
)
def loss_that_is_no_function():
    piper.trace(params(), loss, batch())  # type: ignore[arg-type]


@expected(
    piper.TraceError,
    """
    trace: optimizer is a float, without init and update.
    help: pass an optax.GradientTransformation such as optax.adamw(1e-3).
""",
)
def optimizer_that_is_a_number():
    piper.trace(loss, params(), batch(), optimizer=1e-3)


# -- the batch ----------
@expected(
    piper.DirectiveError,
    """
    Strategy at small_model.py:38: split[1]: 18 rows of batch x (18, 4) are not divisible by 4 microbatches.
    help: nearest legal numbers of microbatches: 2, 3, 6.
""",
)
def batch_not_divisible_into_microbatches():
    parallelized(rows=18, pipeline_parallel=2, data_parallel=2, num_microbatches=4)


@expected(
    piper.PlanError,
    """
batch-divides: split[1] at small_model.py:38: 20 rows of batch x are not divisible by 4 microbatches x 2 replicas of g0.
help: use a batch of 16 rows, or other degrees.
""",
)
def batch_not_divisible_over_replicas():
    parallelized(rows=20, pipeline_parallel=2, data_parallel=2, num_microbatches=4)


@expected(
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


@expected(
    piper.TraceError,
    """
    trace: the batch holds no array with a batch dimension.
    help: pass arrays [batch, ...].
""",
)
def no_batch_dimension():
    piper.trace(lambda p, b: p[0].sum() * b, params(), 3.0)


# -- the loss ----------
@expected(
    piper.TraceError,
    """
    trace: alone(params) at FILE.py:LINE does not take (params, batch) or (params, batch, rng).
    help: give further arguments defaults, or bind them with functools.partial.
""",
)
def loss_of_one_argument():
    def alone(params):
        return apply(params, batch()).mean()

    piper.trace(alone, params(), batch())


@expected(
    piper.TraceError,
    """
    trace: the loss of <lambda> at FILE.py:LINE is float32[16], not a floating-point scalar.
    help: reduce it, for example with .mean(), or return (loss, aux) with a scalar loss.
""",
)
def loss_not_scalar():
    piper.trace(lambda p, b: apply(p, b).mean(-1), params(), batch())


@expected(
    piper.TraceError,
    """
    trace: the loss of <lambda> at FILE.py:LINE is int32[], not a floating-point scalar.
    help: reduce it, for example with .mean(), or return (loss, aux) with a scalar loss.
""",
)
def loss_of_integers():
    piper.trace(partial(jax.jit(lambda scale, p, b: (scale * apply(p, b) > 0).sum()), 2), params(), batch())


@expected(
    piper.TraceError,
    """
    trace: the WeightedLoss.weight of <lambda> at FILE.py:LINE depends on parameters.
    help: compute it from the batch alone, for example from the padding mask.
""",
)
def weight_that_depends_on_parameters():
    piper.trace(lambda p, b: piper.WeightedLoss(apply(p, b).sum(), apply(p, b).sum()), params(), batch())


@expected(
    piper.TraceError,
    """
    trace: nothing in the loss of <lambda> at FILE.py:LINE depends on both the parameters and the batch.
    help: the loss function must use its first two arguments.
""",
)
def loss_without_parameters():
    piper.trace(lambda p, b: b["x"].mean(), params(), batch())


@expected(
    piper.TraceError,
    """
    trace: the model computes something else for a batch of 32 rows, from `cos` at the loss function on.
    help: its Python code branches on the batch size (some libraries do for one row); use jnp.where, or larger slices.
""",
)
def model_that_branches_on_the_batch_size():
    piper.trace(lambda p, b: (jnp.sin if len(b["x"]) > ROWS else jnp.cos)(apply(p, b)).mean(), params(), batch())


@expected(
    piper.TraceError,
    """
    annotate("PP") inside `cond` at the loss function (FILE.py:LINE).
    help: a cond is computed in one place; put the region around all of it, or write what it holds as Python code.
""",
)
def regions_inside_a_branch():
    def branching(kernels: Any, batch: Any) -> Any:
        def region(x: Any) -> Any:
            with piper.annotate("PP"):
                return jnp.tanh(x @ kernels[0])

        return jax.lax.cond(batch["x"][0, 0] > 0, region, lambda x: x, batch["x"]).mean()

    piper.trace(branching, params(), batch())


@expected(
    piper.TraceError,
    """
    mean_over_replicas inside `cond` at the loss function (FILE.py:LINE).
    help: each replica may go another way there; take the mean outside, and choose with jnp.where.
""",
)
def mean_over_replicas_inside_a_branch():
    def branching(x: Any, t: Any) -> Any:
        return jax.lax.cond(t > 0, piper.mean_over_replicas, lambda x: x, x), None

    def looped(kernels: Any, batch: Any) -> Any:
        return jax.lax.scan(branching, batch["x"] @ kernels[0], jnp.ones(2))[0].mean()

    piper.trace(looped, params(), batch())


# -- before compiling ----------
@expected(
    piper.PlanError,
    """
    4 nodes have no group yet, the first is F[PP=0] 0-1.
    help: call plan.place(where(PP=0), group=...), or plan.apply(strategy).
""",
)
def plan_without_placement():
    piper.compile(piper.trace(loss, params(), batch(), optimizer=optax.sgd(0.1)).cut(stages=2))


@expected(
    piper.RuntimeFault,
    """
    compile: devices=[0, 1] are no JAX devices.
    help: devices=jax.devices().
""",
)
def devices_by_number():
    parallelized(devices=[0, 1], data_parallel=2)


@expected(
    piper.RuntimeFault,
    """
    compile: group g3 needs logical device 3; only 3 are given.
    help: pass more devices, or lower data_parallel or pipeline_parallel; planning and simulation need none.
""",
)
def too_few_devices():
    parallelized(pipeline_parallel=4, data_parallel=1, num_microbatches=4, devices=jax.devices()[:3])


@expected(
    piper.RuntimeFault,
    """
    compile: devices is a map of other groups than this plan's.
    help: DeviceMap.of(plan, jax.devices()).
""",
)
def map_of_another_plan():
    plan = piper.trace(loss, params(), batch(), optimizer=optax.sgd(0.1))
    two, four = (plan.apply(piper.Strategy(data_parallel=n, pipeline_parallel=2)) for n in (2, 4))
    piper.compile(two, devices=piper.DeviceMap.of(four, jax.devices()))


@pytest.mark.parametrize("name", expected.cases)
def test_message(name: str, lowered: list[str]) -> None:
    expected.check(name)
    assert not lowered
