"""What a user reads after arguments, a batch, a loss or devices that cannot be: the whole text; nothing is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from expected import Expected
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P
from small_model import DIM, ROWS, apply, batch, loss, parallelized, params

import piper_jax as piper
from piper_jax.tracing.model_state import model_state

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
    help: known: ...
""",
)
def carried_path_that_is_none():
    def carrying(params: Any, batch: Any) -> Any:
        return loss(params, batch), {"state": piper.Carried({"weigth": jnp.zeros(())})}

    piper.trace(carrying, params(), batch())


# -- partitioning metadata ----------
@expected(
    piper.TraceError,
    """
    trace: w has 2 dimensions [4, 4], its partitioning names 3: ('embed', 'mlp', 'heads').
    help: give one name (or None) for each dimension where the parameter is made.
""",
)
def names_of_another_rank():
    boxed = nn.Partitioned(jnp.ones((DIM, DIM)), names=("embed", "mlp", "heads"))
    piper.trace(lambda p, b: (b["x"] @ p["w"].value).mean(), {"w": boxed}, {"x": np.ones((ROWS, DIM), np.float32)})


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


# -- regions ----------
@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: the model has 4 units, too few for 6 stages.
        annotate("PP") around FILE.py:LINE is no unit: nothing in it depends on the parameters; its readers compute it.
        annotate("PP") around FILE.py:LINE is no unit: nothing in it depends on the batch; its readers compute it.
    help: use 1 to 4 stages, or annotate more regions.
""",
)
def regions_that_are_no_units():
    def scaled(kernels: Any, rows: Any) -> Any:
        with piper.annotate("PP"):
            x = rows["x"] / 255
        with piper.annotate("PP"):
            decay = jnp.sum(kernels[0] ** 2)
        return apply(kernels, {"x": x}).mean() + decay

    plan = piper.trace(scaled, params(), batch())
    assert str(plan).count("is no unit") == 2
    plan.cut(stages=6)


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: the model has 2 units, too few for 4 stages.
        `fori_loop` at FILE.py:LINE holds 97% of the operations and is one unit: scan over the stacked parameters, or enter piper.annotate("PP") in its body.
    help: use 1 to 2 stages, or annotate more regions.
""",  # noqa: E501
)
def a_model_in_one_loop():
    def looped(kernels: Any, rows: Any) -> Any:
        return jax.lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ kernels[i]), rows["x"]).mean()

    plan = piper.trace(looped, jnp.ones((4, 4, 4)), batch())
    assert "`fori_loop`" not in str(plan)
    assert "`fori_loop`" in str(plan.cut(stages=2))
    plan.cut(stages=4)


@expected(
    piper.TraceError,
    """
    trace: wrt=('a.*', 'lora'): no parameter has 'lora'.
    help: such as a.lora_b, a.lora_a.
""",
)
def trained_leaves_of_a_path_that_does_not_exist():
    model_state({"a": dict.fromkeys(("kernel", "lora_a", "lora_b"), 1.0)}, ("a.*", "lora"))


@expected(
    piper.TraceError,
    """
    trace: wrt={'a': True} is no path, nor a tree of booleans like the parameters.
    help: such as wrt="*.lora_a", wrt=("adapters", "head.bias"), or a tree of booleans with the keys of the parameters.
""",
)
def trained_leaves_of_another_tree():
    model_state({"a": 1.0, "b": 2.0}, {"a": True})


@expected(
    piper.TraceError,
    """
    trace: wrt='steps' chooses no floating-point array of the dict.
    help: such as wrt="*.lora_a", wrt=("adapters", "head.bias"), or a tree of booleans with the keys of the parameters.
""",
)
def nothing_to_train_in_what_is_chosen():
    model_state({"a": 1.0, "steps": 2}, "steps")


@expected(
    piper.TraceError,
    """
    trace: wrt=LoRAParam chooses no floating-point array of the Linear.
    help: such as wrt=nnx.LoRAParam for modules with such variables; without wrt all parameters are trained.
""",
)
def a_filter_of_variables_that_matches_nothing():
    model_state(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), nnx.LoRAParam)


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
    trace: the loss is float32[16], not a floating-point scalar.
    help: reduce it, for example with .mean(), or return (loss, aux) with a scalar loss.
""",
)
def loss_not_scalar():
    piper.trace(lambda p, b: apply(p, b).mean(-1), params(), batch())


@expected(
    piper.TraceError,
    """
    trace: the loss is int32[], not a floating-point scalar.
    help: reduce it, for example with .mean(), or return (loss, aux) with a scalar loss.
""",
)
def loss_of_integers():
    piper.trace(lambda p, b: (apply(p, b) > 0).sum(), params(), batch())


@expected(
    piper.TraceError,
    """
    trace: the weight of the WeightedLoss depends on parameters.
    help: compute it from the batch alone, for example from the padding mask.
""",
)
def weight_that_depends_on_parameters():
    piper.trace(lambda p, b: piper.WeightedLoss(apply(p, b).sum(), apply(p, b).sum()), params(), batch())


@expected(
    piper.TraceError,
    """
    trace: nothing in the loss depends on both the parameters and the batch.
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


# -- constraints ----------
class Constrained(nnx.Module):
    """A layer inside a layer, whose constraint is given."""

    def __init__(self, spec: Any, depth: int = 1):
        self.inner = Constrained(spec, 0) if depth else nnx.Linear(DIM, DIM, rngs=nnx.Rngs(0))
        self.spec = P(None, "tensor") if depth else spec

    def __call__(self, x: Any) -> Any:
        return jax.lax.with_sharding_constraint(self.inner(x), self.spec)


@expected(
    piper.TraceError,
    """
    trace: a sharding constraint at FILE.py:LINE, in inner, does not fit.
        Resource axis: tensr of P('tensr',) is not found in mesh: ('data', 'expert', 'tensor').
    help: name data, expert, tensor alone, each once, in one entry for each dimension at most; so must Flax's rules.
""",
)
def constraint_with_an_axis_that_is_not():
    piper.trace(lambda model, batch: model(batch["x"]).mean(), Constrained(P("tensr")), batch())


def test_constraints_of_other_ranks_and_axes_named_twice() -> None:
    for spec, fault in ((P(None, None, "tensor"), "rank at least 3"), (P("data", "data"), "duplicate entries")):
        with pytest.raises(piper.TraceError, match=fault) as caught:
            piper.trace(lambda model, batch: model(batch["x"]).mean(), Constrained(spec), batch())
        assert "test_tracing_errors.py" in str(caught.value)


@expected(
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


@expected(
    piper.TraceError,
    """
    trace: the parameters (list) hold no floating-point array to train.
    help: pass a pytree of arrays, or an nnx.Module with nnx.Param variables (or wrt=...).
""",
)
def no_parameters():
    piper.trace(loss, [1, 2], batch())


@expected(
    piper.AnnotationError,
    """
    annotate('PPP'): unknown region tag
    help: did you mean 'PP'?
""",
)
def unknown_tag():
    piper.annotate("PPP")


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
