"""A compiled plan: its steps, evaluation, and what can be asked about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import jax
import numpy as np

from piper_jax.arguments import checked
from piper_jax.device_map import DeviceMap
from piper_jax.errors import RuntimeFault, counted
from piper_jax.hints import From
from piper_jax.ir.filters import Filter
from piper_jax.ir.ids import NodeId
from piper_jax.ir.node_names import node_named
from piper_jax.lowering.instruction import Instruction
from piper_jax.lowering.keys import Key
from piper_jax.lowering.placing import placed
from piper_jax.lowering.programs import Compiler
from piper_jax.planning import Plan
from piper_jax.runtime.batch_size import checked_batch_size
from piper_jax.runtime.bisection import Bisection, Difference
from piper_jax.runtime.collecting import collected
from piper_jax.runtime.excess import ExcessRows
from piper_jax.runtime.executables import Executables, Mode
from piper_jax.runtime.executor import Executor
from piper_jax.runtime.following import follow
from piper_jax.runtime.host_state import HostState, from_host, to_host
from piper_jax.runtime.node_run import NodeRun, run_alone
from piper_jax.runtime.nonfinite import NonFinite, first_nonfinite
from piper_jax.runtime.optimizer_state import parameters_kept_as, single_numbers
from piper_jax.runtime.profiling import profile
from piper_jax.runtime.ready import Ready, accumulators, first_gradients, tokens
from piper_jax.runtime.state import StateLayout, TrainState
from piper_jax.runtime.timing import measure, record
from piper_jax.simulation import MeasuredCosts, Report, measured_report
from piper_jax.tracing.source import Source
from piper_jax.tracing.tracer import trace_alike


@dataclass(kw_only=True)
class Train:
    """A compiled plan. Steps of any batch size that divides into slices; each new size compiles once.

    Attributes:
      plan: the plan that runs.
      devices: physical devices, indexed by logical id.  device_map: how they were chosen.
      compiler: counts of XLA compilations and of programs that re-used one.
      compile_limit: seconds that a process waits until all others have compiled their programs too.
    """

    plan: Plan
    devices: tuple[Any, ...]
    device_map: DeviceMap | None = None
    compiler: Compiler = field(default_factory=Compiler)
    compile_limit: float = 1800.0
    _base: Train | None = None
    _other: dict[Any, Train] = field(default_factory=dict)
    _accumulators: dict[Key, jax.Array] = field(default_factory=dict)
    _tokens: dict[Key, jax.Array] = field(default_factory=dict)
    _profiled: Train | None = None
    _running: Executor | None = None
    _excess: ExcessRows = field(default_factory=ExcessRows)

    def __repr__(self) -> str:
        plan, programs = self.plan, self.compiler.num_compiles
        counts = {"stage": plan.num_stages, "microbatch": plan.num_microbatches, "program": programs}
        return f"Train({', '.join(counted(count, noun) for noun, count in counts.items())})"

    # -- state ---------------------------------------------------------------------------------------
    @checked(RuntimeFault, apart=("state",))
    def init(self, params: Any, seed: Annotated[int, From(0, 2**63 - 1)] = 0) -> TrainState:
        """A fresh state from the user's parameters, which are copied and never donated.

        Args:
          params: the pytree (or module) that was traced, or one of the same structure, shapes and dtypes.
          seed: of the key that dropout and the like draw from; slice ``s`` of step ``t`` gets
            ``fold_in(fold_in(key(seed), t), s)``.
        """
        return self._state_layout.init(params, seed)

    @checked(RuntimeFault, apart=("state",))
    def params(self, state: TrainState) -> Any:
        """The parameters in the model's own layout (a pytree, or a module), as plain arrays on the first device."""
        self._excess.check(wait=True)
        source = self._source
        leaves = self._state_layout.leaves(state, "state", len(source.state.leaves), self._executables.device, "params")
        return source.state.build(leaves)

    @checked(RuntimeFault, apart=("state",))
    def opt_state(self, state: TrainState) -> Any:
        """The optax state in its own structure, as plain arrays on the first device."""
        self._excess.check(wait=True)
        optimizer = self._need_optimizer("opt_state")
        leaves = self._state_layout.leaves(
            state, "optimizer", len(optimizer.leaf_specs), self._executables.device, "opt_state"
        )
        return optimizer.build(leaves)

    @checked(RuntimeFault, apart=("state",))
    def scalars(self, state: TrainState, *names: str) -> dict[str, jax.Array]:
        """Copies of numbers in the optax state that belong to no one parameter: counts, norms, rates.

        Args:
          names: the last parts of their paths in the optax state, such as ``"count"``.

        Returns:
          By name, each on one device of this process. Nothing is waited for, and the state may be stepped on.
        """
        self._need_optimizer("scalars")
        return single_numbers(self._state_layout, state, names)

    @checked(RuntimeFault, apart=("state",))
    def with_params_of(self, state: TrainState, name: str) -> TrainState:
        """The state whose parameters are the copy of them that the optax state keeps, such as a moving average.

        Args:
          name: the part of the copy's path in the optax state before the path of a parameter.

        Returns:
          A state to evaluate, not to step on: it shares its other arrays with ``state``.
        """
        self._need_optimizer("with_params_of")
        return parameters_kept_as(self._state_layout, state, name)

    def to_host(self, state: TrainState, only: Annotated[int, From(0)] | None = None) -> HostState:
        """Whole leaves in host memory, as the model and the optimizer have them, for checkpoints; changes nothing."""
        self._excess.check(wait=True)
        return to_host(self._state_layout, state, only)

    def from_host(self, found: HostState) -> TrainState:
        """A state with the values that ``to_host`` gave, of this plan or any other of the same model and optimizer."""
        return from_host(self._state_layout, found)

    # -- running -------------------------------------------------------------------------------------
    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """One training step; consumes ``state``.

        Returns:
          The new state and the metrics: ``"loss"`` and the auxiliary outputs, as plain arrays.
        """
        self._need_optimizer("step")
        self._excess.check()
        ready, results = self._run("step", state, batch)
        arrays = tuple(results[k] for k in self._state_layout.keys)
        return TrainState(arrays), ready.gather([results[k] for k in ready.gather.keys])

    def gradients(self, state: TrainState, batch: Any) -> Any:
        """The gradients of one step in the layout of the trainable parameters, on the first device; changes nothing."""
        ready, results = self._run("gradients", state, batch)
        self._excess.check(wait=True)
        gradients = collected(ready.context, results, first_gradients(ready.context), self._executables.device)
        return self._source.state.trainable_tree(gradients)

    @checked(RuntimeFault, apart=("state",))
    def evaluate(self, state: TrainState, batch: Any, loss_fn: Callable[..., Any] | None = None) -> dict[str, Any]:
        """Loss and metrics of a batch, forward passes only, on the placement of training; changes nothing.

        Args:
          loss_fn: another loss for evaluation, such as one without dropout.
        """
        other = self if loss_fn is None else self._following(loss_fn, batch, forward_only=False)
        return other._evaluate(state, batch, "evaluate")

    def _evaluate(self, state: TrainState, batch: Any, call: str) -> dict[str, Any]:
        ready, results = self._run("evaluate", state, batch, call)
        self._excess.check(wait=True)
        return ready.gather([results[k] for k in ready.gather.keys])

    @checked(RuntimeFault, apart=("state",))
    def predict(self, state: TrainState, batch: Any, fn: Callable[..., Any] | None = None) -> Any:
        """Outputs of ``fn(params_or_model, batch)`` for all rows, in their order, on the placement of training.

        Args:
          fn: returns any pytree; leaves ``[batch, ...]`` are put together in sample order, others averaged (floats) or
            summed (integers). Without it, the auxiliary outputs of the loss function are returned.
        """
        if fn is None:
            metrics = self._evaluate(state, batch, "predict")
            return metrics.get("aux", {k: v for k, v in metrics.items() if k != "loss"})
        return self._following(fn, batch, forward_only=True)._evaluate(state, batch, "predict")["aux"]

    @checked(RuntimeFault, apart=("state",))
    def bisect(self, state: TrainState, batch: Any, rtol: Annotated[float, From(0)] = 2e-5) -> Difference | None:
        """Runs plan and reference side by side; the first node whose values differ by more than ``rtol``, or None.

        Values between stages, their cotangents and the gradients are compared in dispatch order; changes nothing.
        """
        self._need_one_process("bisect")
        ready, values = self._for_batch("gradients", batch, "bisect")
        instructions = ready.executor.instructions
        kept = dict.fromkeys(k for i in instructions for k in i.writes)
        given = {**self._registers(ready, state, "bisect"), **ready.constants, **ready.placed(values)}
        registers = Executor(instructions, tuple(kept)).run({**given, **self._fresh(ready)})
        return Bisection(context=ready.context, registers={**given, **registers}, rtol=rtol).first(instructions)

    def run_node(self, node: NodeId | Filter | str, state: TrainState, batch: Any) -> NodeRun:
        """Runs one node of the plan alone, after what it needs; changes nothing.

        Args:
          node: F, B, BI or BW of one microbatch as plans print it, ``"F[PP=1,MB=0]"``, with the operation where a
            stage has several (``"F[PP=1,MB=0] layers.4"``); its id; or a filter that selects it alone.

        Returns:
          Its inputs and outputs, each with its norm and its difference from one device; prints as a table.

        Raises:
          FilterError: there is no such node, or there are several; the message has the nearest name.
        """
        self._need_one_process("run_node")
        name = node_named(self.plan.complete(), node)
        ready, values = self._for_batch("gradients", batch, "run_node")
        lowering = self._executables.lowering(ready.context.batch_size, training=True)
        held = self._registers(ready, state, "run_node")
        given = {**held, **ready.constants, **ready.placed(values), **tokens(ready.context)}
        return run_alone(lowering, ready.executor.instructions, given, name)

    def first_nonfinite(self, state: TrainState, batch: Any, step: int | None = None) -> NonFinite | None:
        """Runs the nodes of a step one after another; the first array that is NaN or infinite, or None.

        Args:
          step: steps done before, which random keys depend on; None: as the state has it.
        """
        ready, values = self._for_batch("gradients", batch, "first_nonfinite")
        lowering = self._executables.lowering(ready.context.batch_size, training=True)
        held = self._registers(ready, state, "first_nonfinite")
        if step is not None:
            clocks = {k: a.sharding for k, a in held.items() if k.kind == "step"}
            held |= zip(clocks, placed([np.int32(step)] * len(clocks), list(clocks.values())), strict=True)
        given = {**held, **ready.constants, **ready.placed(values), **self._fresh(ready)}
        return first_nonfinite(lowering, ready.executor.instructions, given)

    @checked(RuntimeFault, apart=("state",))
    def profile(self, state: TrainState, batch: Any, title: str = "") -> Report:
        """Runs one step twice without donation and measures the second; the state is not consumed.

        Returns:
          A report like a simulated one: spans in seconds, busy time and bubble, memory by kind on each group.
        """
        self._need_one_process("profile")
        if self._profiled is None:
            self._profiled = Train(plan=self.plan, devices=self.devices, compiler=Compiler(donation=False), _base=self)
        ready, values = self._profiled._for_batch("step", batch, "profile")
        held = self._registers(ready, state, "profile")
        for _ in range(2):
            given = {**held, **ready.constants, **ready.placed(values), **self._fresh(ready)}
            jax.block_until_ready(given)
            found = profile(ready.context, ready.executor.instructions, given, ready.executor.wanted)
        return measured_report(self.plan, found.spans, memory=found.memory, title=title)

    @checked(RuntimeFault, apart=("state",))
    def measure_costs(self, state: TrainState, batch: Any, rounds: Annotated[int, From(1)] = 5) -> MeasuredCosts:
        """Times each distinct program and transfer of a step on its devices; the state is not consumed.

        Args:
          rounds: timed calls of each, after one that is not counted; the median is kept.

        Returns:
          Costs for ``piper.simulate(train.plan, costs=...)``: what each takes alone, and how many groups compute at
          full speed at once where they share processors, as virtual CPU devices do. Other work on the machine counts.
        """
        self._need_optimizer("measure_costs")
        self._need_one_process("measure_costs")
        ready, values = self._for_batch("step", batch, "measure_costs")
        instructions, wanted = ready.executor.instructions, ready.executor.wanted
        held = self._registers(ready, state, "measure_costs")
        given = {**held, **ready.constants, **ready.placed(values), **self._fresh(ready)}
        recording = record(instructions, given, wanted)
        metrics = [recording.results[k] for k in ready.gather.keys]
        outside = lambda: (ready.placed(values), ready.gather(metrics))  # noqa: E731
        return measure(self.plan.complete(), instructions, recording, outside, rounds)

    @checked(RuntimeFault)
    def rows(self, batch_size: Annotated[int, From(1)] | None = None) -> tuple[int, ...]:
        """Rows of a batch that devices of this process read in a training step; the others may hold anything.

        Where several processes run the plan, each can load its own; in one process it is all of them.
        """
        return self._executables.ready("step", batch_size or self._source.batch.size).rows()

    @property
    def position(self) -> str | None:
        """What is being dispatched, such as ``compute F[PP=1,MB=0]``, for watchdogs; None between steps."""
        executor = self._running
        if executor is None or executor.at is None:
            return None
        instruction = executor.instructions[executor.at]
        return f"{instruction.role} {instruction.nodes[0] if instruction.nodes else instruction.label}"

    # -- reports ---------------------------------------------------------------------------------------
    @checked(RuntimeFault, apart=("state",))
    def instructions(self, batch_size: Annotated[int, From(1)] | None = None) -> tuple[Instruction, ...]:
        """What one training step dispatches, in order; compiles it if it has not run yet."""
        size = batch_size or self._source.batch.size
        return self._executables.ready("step", size).executor.instructions

    def collectives(self, batch_size: int | None = None) -> dict[str, dict[str, int]]:
        """The collectives in the compiled programs of a step, by label and kind; those of the tensor axis included.

        Each distinct program counts once. The plan's own are ``train.plan.complete().nodes``.
        """
        found = {i.program.digest: i for i in self.instructions(batch_size) if i.program is not None}
        counted = {i.label: dict(i.program.collectives()) for i in found.values() if i.program is not None}
        return {label: counts for label, counts in counted.items() if counts}

    # -- internals -------------------------------------------------------------------------------------
    @property
    def _source(self) -> Source:
        return self.plan.source

    def _need_optimizer(self, what: str) -> Any:
        if self._source.optimizer is None:
            raise RuntimeFault(f"{what}: the plan was traced without an optimizer.", help="trace(..., optimizer=tx)")
        return self._source.optimizer

    @staticmethod
    def _need_one_process(what: str) -> None:
        if jax.process_count() > 1:
            raise RuntimeFault(
                f"{what}: this is one of {counted(jax.process_count(), 'process')}, which see a part of the plan each.",
                help="run it in one process with as many devices; virtual CPU devices will do.",
            )

    @property
    def _state_layout(self) -> StateLayout:
        return self._executables.layout

    @cached_property
    def _executables(self) -> Executables:
        return Executables(
            plan=self.plan, devices=self.devices, compiler=self.compiler, compile_limit=self.compile_limit
        )

    def _for_batch(self, mode: Mode, batch: Any, call: str) -> tuple[Ready, list[Any]]:
        """The executable for this batch, and its leaves; messages name the user's ``call``."""
        values = self._source.batch.values(batch, call)
        return self._executables.ready(mode, checked_batch_size(self._source.batch, values, call)), values

    def _run(self, mode: Mode, state: TrainState, batch: Any, call: str = "") -> tuple[Ready, dict[Key, Any]]:
        """Runs one mode on a batch, for the ``call`` of its name unless said otherwise; returns the kept registers."""
        ready, values = self._for_batch(mode, batch, call or mode)
        given = {**self._registers(ready, state, call or mode), **ready.constants, **ready.placed(values)}
        owner = self._base or self
        if any(Key("token", group) not in owner._tokens for group in ready.context.here):
            given.update(tokens(ready.context))
        given.update(owner._tokens)
        if mode != "evaluate":
            given.update(self._accumulators or accumulators(ready.context))
            self._accumulators = {}
        self._running = ready.executor
        results = ready.executor.run(given)
        if mode != "evaluate":
            self._accumulators = {k: v for k, v in results.items() if k.kind.startswith("accumulator")}
        owner._tokens |= {k: v for k, v in results.items() if k.kind == "token"}
        self._excess.add(ready.context, ready.gather.excess(results))
        return ready, results

    @staticmethod
    def _fresh(ready: Ready) -> dict[Key, Any]:
        return {**accumulators(ready.context), **tokens(ready.context)}

    def _registers(self, ready: Ready, state: TrainState, call: str) -> dict[Key, Any]:
        """The state's arrays; what another plan placed elsewhere is copied to where this one reads it."""
        layout = (self._base or self)._state_layout
        registers = layout.registers(state, call)
        if self._base is None:
            return registers
        anywhere = {(k.kind.removesuffix("_shard"), k.item): k for k in reversed(registers)}
        given = dict(registers)
        for key in ready.executor.inputs:
            if key not in given and (key.kind, key.item) in anywhere:
                target = ready.context.sharding(key)
                given[key] = layout.whole(registers, anywhere[key.kind, key.item], target)
        return given

    def _following(self, fn: Callable[..., Any], batch: Any, *, forward_only: bool) -> Train:
        key = (fn, forward_only)
        if key not in self._other:
            plan = follow(self.plan, trace_alike(self.plan, fn, batch, forward_only=forward_only))
            self._other[key] = Train(plan=plan, devices=self.devices, compiler=self.compiler, _base=self._base or self)
        return self._other[key]
