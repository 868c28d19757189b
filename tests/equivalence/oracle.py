"""The comparison that every equivalence test makes: a strategy against the one-device reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from tolerances import TOLERANCES, Tolerance, assert_close, assert_moved

import piper_jax as piper
from piper_jax.runtime.reference import reference_step
from piper_jax.tracing.batch_layout import batch_layout
from piper_jax.tracing.loss_program import trace_loss
from piper_jax.tracing.model_state import ModelState, model_state

SEED = 7


def adamw() -> optax.GradientTransformation:
    """Adam whose epsilon is far above rounding noise, so that equal gradients mean equal updates; clipping active."""
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(2e-2, eps=1e-2, weight_decay=1e-2))


def momentum(learning_rate: float = 0.1) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum=0.9)


@dataclass(kw_only=True)
class Problem:
    """A model, its loss and its batch, and what a step of it means on one device.

    Attributes:
      loss_fn, params, batch, optimizer, wrt: as for ``piper.parallelize``.
      precision: a row of the table of tolerances.
      steps: compared after this many; each sees the batch rolled by one row more.
    """

    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    optimizer: optax.GradientTransformation = field(default_factory=adamw)
    wrt: Any = None
    precision: str = "float32"
    steps: int = 3
    _references: dict[tuple[int, int], Reference] = field(default_factory=dict)

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.precision]

    @cached_property
    def state(self) -> ModelState:
        """Its parameters, with those among them that the loss function changes."""
        state, layout = model_state(self.params, self.wrt), batch_layout(self.batch)
        return state.carrying({c.leaf: c.carry for c in trace_loss(self.loss_fn, state, layout, layout.size).carried})

    def batch_of(self, step: int) -> Any:
        return jax.tree.map(lambda v: np.roll(v, step, axis=0) if getattr(v, "ndim", 0) else v, self.batch)

    def reference(self, num_microbatches: int, num_replicas: int) -> Reference:
        """What the steps give by definition; computed once for each number of slices."""
        slices = num_microbatches, num_replicas
        if slices not in self._references:
            self._references[slices] = _reference(self, *slices)
        return self._references[slices]

    @cached_property
    def traced(self) -> piper.Plan:
        return piper.trace(self.loss_fn, self.params, self.batch, optimizer=self.optimizer, wrt=self.wrt)

    def parallelize(self, strategy: piper.Strategy) -> piper.Train:
        return piper.compile(self.traced.apply(strategy))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Losses of each step, gradients of the first, and parameters and optimizer state at both ends.

    ``carried`` is the state, by path, that the loss function changes.
    """

    losses: tuple[float, ...]
    gradients: Any
    start: Any
    trained: Any
    opt_state: Any
    carried: dict[str, Any]


def _reference(problem: Problem, num_microbatches: int, num_replicas: int) -> Reference:
    state = problem.state
    values = state.values(problem.params)
    start = state.trainable_tree([values[i] for i in state.trainable])
    opt_state = jax.jit(problem.optimizer.init)(start)
    layout = batch_layout(problem.batch)

    @jax.jit
    def run(values: Any, opt_state: Any, batch: Any, step: Any) -> tuple[Any, ...]:
        loss, gradients, params, after = reference_step(
            problem.loss_fn, state.build(values), opt_state, layout.build(batch), optimizer=problem.optimizer,
            wrt=problem.wrt, key=jax.random.key(SEED), step=step, num_microbatches=num_microbatches,
            num_replicas=num_replicas,
        )  # fmt: skip
        return loss, gradients, state.values(params), after

    losses, first = [], None
    for step in range(problem.steps):
        loss, gradients, values, opt_state = run(values, opt_state, layout.values(problem.batch_of(step), "step"), step)
        losses.append(float(loss))
        first = gradients if first is None else first
    return Reference(
        losses=tuple(losses), gradients=first, start=start, opt_state=opt_state,
        trained=state.trainable_tree([values[i] for i in state.trainable]), carried=_carried(state, values),
    )  # fmt: skip


def _carried(state: ModelState, values: Sequence[Any]) -> dict[str, Any]:
    pairs = zip(state.leaves, values, strict=True)
    return {leaf.path: value for leaf, value in pairs if leaf.kind == "mutable"}


def assert_equivalent(problem: Problem, strategy: piper.Strategy) -> piper.Train:
    """Gradients, losses, parameters and optimizer state of ``strategy`` are those of the reference.

    Returns:
      The compiled plan, for further questions.
    """
    train = problem.parallelize(strategy)
    replicas = strategy.data_parallel * strategy.expert_parallel
    expected = problem.reference(train.plan.num_microbatches, replicas)
    assert_steps(problem, train, expected)
    return train


def assert_steps(
    problem: Problem,
    train: piper.Train,
    expected: Reference,
    after_step: Callable[[piper.Train, Any], None] = lambda train, state: None,
) -> None:
    """A compiled plan takes the steps of a reference; ``after_step`` looks at the state after each."""
    state, losses = train.init(problem.params, seed=SEED), []
    assert_close(train.gradients(state, problem.batch), expected.gradients, problem.tolerance, "gradient")
    for step in range(problem.steps):
        state, metrics = train.step(state, problem.batch_of(step))
        losses.append(float(metrics["loss"]))
        after_step(train, state)
    assert_close(losses, list(expected.losses), problem.tolerance, "loss of step")
    known = train.plan.source.state
    values = known.values(train.params(state))
    trained = known.trainable_tree([values[i] for i in known.trainable])
    assert_close(trained, expected.trained, problem.tolerance, "parameter")
    assert_moved(trained, expected.trained, expected.start, problem.tolerance, "parameter")
    assert_close(train.opt_state(state), expected.opt_state, problem.tolerance, "optimizer")
    carried = _carried(known.undivided, known.undivided.values(train.params(state)))
    assert_close(carried, expected.carried, problem.tolerance, "carried")


def trainable_part(params: Any, wrt: Any = None) -> Any:
    """The trainable leaves of a pytree or module, as the optimizer sees them."""
    state = model_state(params, wrt)
    values = state.values(params)
    return state.trainable_tree([values[i] for i in state.trainable])


def strategy(
    *, stages: int = 1, data: int = 1, microbatches: int = 1, schedule: str = "1F1B", **degrees: int
) -> piper.Strategy:
    """A strategy of one schedule, in few words."""
    return piper.Strategy(
        pipeline_parallel=stages, data_parallel=data, num_microbatches=microbatches,
        directives=(piper.directive(schedule),), **degrees,
    )  # fmt: skip
