"""The passes of a chunk as flat programs: forward with residuals, backward from residuals, and forward alone.

Residuals that are parameters or inputs are referenced, and those that follow from parameters or from the batch alone
are computed again in the backward pass, so that only activations are kept between the two, and state that the next
microbatch sees changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.tracing.alike import alike
from piper_jax.tracing.backward_split import Halves, split_backward
from piper_jax.tracing.checkpoints import run_checkpointed
from piper_jax.tracing.chunk import Chunk
from piper_jax.tracing.constraints import under_a_mesh
from piper_jax.tracing.dispatch import Dispatch
from piper_jax.tracing.flat import Atom, Flat, flatten, read
from piper_jax.tracing.local_experts import EXPERT_AXIS
from piper_jax.tracing.loss_program import LossProgram

SEEDS = ("loss", "total", "extra")
_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator")


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Flat programs of a chunk. Their inputs come in the order state, batch, key (if used), externals.

    Attributes:
      evaluate: inputs -> exports, one partial sum per kind in ``kinds``, metrics, carried state.
      forward: inputs -> the same, then residuals.
      backward: inputs, residuals, cotangents of ``diff_exports``, seeds of ``kinds`` -> cotangents of
        ``diff_externals``, gradients of ``diff_state``. None without a backward pass.
      kinds: which of loss, total and extra this chunk has terms of.
      halves: the backward program as BI and BW.
    """

    chunk: Chunk
    kinds: tuple[str, ...]
    evaluate: Flat
    forward: Flat
    backward: Flat | None
    halves: Halves | None
    num_residuals: int


def passes(program: LossProgram, chunk: Chunk, remat: str | None = None, experts: Dispatch | None = None) -> Passes:
    """The passes of ``chunk`` at the batch size of ``program``, traced once for all that are alike; computes nothing.

    Args:
      remat: the name of a policy in ``jax.checkpoint_policies``: only what it allows is kept from F for B.
      experts: of an expert region on the experts of one device: parameters, externals and exports are as it says.
    """
    kind = "passes", alike(program, chunk), remat, experts and replace(experts, place="")
    if kind not in program.shared:
        program.shared[kind] = under_a_mesh(lambda: _built(program, chunk, remat, experts), program.axis_names)
    return replace(program.shared[kind], chunk=chunk)


def _built(program: LossProgram, chunk: Chunk, remat: str | None, experts: Dispatch | None) -> Passes:
    kinds = kinds_of_terms(program, chunk)
    function = _ChunkFunction(program, chunk, kinds, remat, experts)
    evaluate = flatten(function.traced(function.outputs)(*function.specs))
    if not chunk.has_backward:
        return Passes(
            chunk=chunk,
            kinds=kinds,
            evaluate=evaluate,
            forward=evaluate,
            backward=None,
            halves=None,
            num_residuals=0,
        )
    return function.with_backward(evaluate)


def kinds_of_terms(program: LossProgram, chunk: Chunk) -> tuple[str, ...]:
    """Which of loss, total and extra a chunk has terms of."""
    return tuple(k for k in SEEDS if any(program.terms[i][0] == k for i in chunk.terms))


class _ChunkFunction:
    def __init__(
        self,
        program: LossProgram,
        chunk: Chunk,
        kinds: tuple[str, ...],
        remat: str | None,
        experts: Dispatch | None,
    ):
        self.program, self.chunk, self.kinds, self.remat, self.experts = program, chunk, kinds, remat, experts
        self.ids = chunk.inputs(program)
        self.parameters = {program.state_input(i) for i in chunk.state}
        self.in_turn = {k for k, i in enumerate(chunk.state) if i in program.in_turn}
        self.specs = [self.aval(v) for v in self.ids]
        differentiable = {*(program.state_input(i) for i in chunk.diff_state), *chunk.diff_externals}
        self.terms = [program.terms[i] for i in chunk.terms]
        self.metrics = [program.metrics[i].atom for i in chunk.metrics]
        self.carried = [program.carried[i].atom for i in chunk.carried]
        read_after = [*(atom for _, atom in self.terms), *self.metrics, *self.carried]
        self.kept = {*chunk.exports, *(a for a in read_after if isinstance(a, int))}
        self.diff = [k for k, v in enumerate(self.ids) if v in differentiable]

    def traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Like ``jax.make_jaxpr``, with the mesh axis of the experts where there is one."""
        axes = [(EXPERT_AXIS, self.experts.num_parts)] if self.experts is not None else None
        return jax.make_jaxpr(function, axis_env=axes)

    def environment(self, inputs: Sequence[Any]) -> dict[int, Any]:
        flat, given = self.program.flat, dict(zip(self.ids, inputs, strict=True))
        if self.experts is not None:
            state, entered = ({v: a for v, a in given.items() if (v in self.parameters) is s} for s in (True, False))
            return self.experts.evaluate(flat, self.chunk, state, entered)
        env = {**flat.consts, **given}
        run_checkpointed(flat, [flat.eqns[i] for i in self.chunk.eqns], env, self.kept)
        return env

    def outputs(self, *inputs: Any) -> list[Any]:
        """Exports, partial sums of the loss, metrics, carried state."""
        return self.results(self.environment(inputs))

    def results(self, env: dict[int, Any]) -> list[Any]:
        found = [*(env[v] for v in self.chunk.exports), *self.partials(env)]
        return [*found, *(jnp.asarray(read(atom, env)) for atom in (*self.metrics, *self.carried))]

    def partials(self, env: dict[int, Any]) -> list[Any]:
        return [sum(jnp.asarray(read(atom, env)) for k, atom in self.terms if k == kind) for kind in self.kinds]

    def differentiated(self, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        """All outputs, and the pullback of (differentiable exports, partials) to the differentiable inputs."""

        def run(*diff: Any) -> tuple[list[Any], list[Any]]:
            filled = list(inputs)
            for position, value in zip(self.diff, diff, strict=True):
                filled[position] = value
            env = self.environment(filled)
            smooth = [*(env[v] for v in self.chunk.diff_exports), *self.partials(env)]
            return smooth, self.results(env)

        if self.remat is not None:
            run = jax.checkpoint(run, policy=getattr(jax.checkpoint_policies, self.remat))
        _, pullback, outputs = jax.vjp(run, *(inputs[k] for k in self.diff), has_aux=True)
        return outputs, pullback

    def with_backward(self, evaluate: Flat) -> Passes:
        treedef: list[Any] = []

        def forward(*inputs: Any) -> list[Any]:
            outputs, pullback = self.differentiated(inputs)
            leaves, tree = jax.tree.flatten(pullback)
            treedef.append(tree)
            return [*outputs, *leaves]

        full = flatten(self.traced(forward)(*self.specs))
        num_outputs = len(evaluate.outputs)
        residuals = full.outputs[num_outputs:]
        saved, recomputed = self.partition(full, residuals)
        smooth = [self.aval(v) for v in self.chunk.diff_exports] + [
            jax.ShapeDtypeStruct((), evaluate.avals[a].dtype if isinstance(a, int) else a.aval.dtype)
            for a in evaluate.outputs[len(self.chunk.exports) : len(self.chunk.exports) + len(self.kinds)]
        ]

        def backward(inputs: Sequence[Any], kept: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            env = {**full.consts, **dict(zip(full.inputs, inputs, strict=True)), **dict(zip(saved, kept, strict=True))}
            full.run((full.eqns[i] for i in recomputed), env)
            pullback = jax.tree.unflatten(treedef[0], [read(a, env) for a in residuals])
            return self.reordered(pullback(list(cotangents)))

        kept = [jax.ShapeDtypeStruct(full.avals[v].shape, full.avals[v].dtype) for v in saved]
        back = flatten(self.traced(backward)(self.specs, kept, smooth), open_remat=True).without_dead_code()
        return Passes(
            chunk=self.chunk,
            kinds=self.kinds,
            evaluate=evaluate,
            forward=replace(full, outputs=(*full.outputs[:num_outputs], *saved)).without_dead_code(),
            backward=back,
            halves=split_backward(back, len(self.chunk.diff_externals), len(self.chunk.state)),
            num_residuals=len(saved),
        )

    def aval(self, value: int) -> jax.ShapeDtypeStruct:
        aval = self.program.flat.avals[value]
        if self.experts is None:
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        return self.experts.state(aval) if value in self.parameters else self.experts.arrived(aval)

    def reordered(self, gradients: Sequence[Any]) -> list[Any]:
        """Cotangents of externals first, then gradients of state."""
        by_value = dict(zip((self.ids[k] for k in self.diff), gradients, strict=True))
        state = [self.program.state_input(i) for i in self.chunk.diff_state]
        return [*(by_value[v] for v in self.chunk.diff_externals), *(by_value[v] for v in state)]

    def partition(self, full: Flat, residuals: Sequence[Atom]) -> tuple[list[int], list[int]]:
        """Residual values to save, and the equations that give the others again from the inputs."""
        on_activation, random = [False] * len(full.avals), [False] * len(full.avals)
        params = {full.inputs[k] for k in range(len(self.chunk.state))}
        kinds = {v: "param" if v in params else "data" for v in full.inputs}
        for k, value in enumerate(full.inputs):
            on_activation[value] = self.ids[k] in self.chunk.externals or k in self.in_turn
        for eqn in full.eqns:
            reads = list(eqn.reads())
            found = {kinds.get(a) for a in reads} - {None}
            mixed = len(found) > 1 or any(on_activation[a] for a in reads)
            for o in eqn.outputs:
                on_activation[o] = mixed
                random[o] = eqn.name in _RANDOM or any(random[a] for a in reads)
                if len(found) == 1:
                    kinds[o] = next(iter(found))
        inputs = {v for k, v in enumerate(full.inputs) if k not in self.in_turn}
        distinct = dict.fromkeys(
            a for a in residuals if isinstance(a, int) and a not in inputs and a not in full.consts
        )
        saved = [v for v in distinct if on_activation[v] or random[v]]
        again = [v for v in distinct if not (on_activation[v] or random[v])]
        given = [*full.inputs, *saved]
        return saved, [i for i in full.needed(again, given) if not full.eqns[i].has_effects]
