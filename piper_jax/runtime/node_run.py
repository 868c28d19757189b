"""One node of a plan, run alone: what it reads and gives, beside the same program on one device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from piper_jax.ir.ids import NodeId
from piper_jax.lowering.context import Context
from piper_jax.lowering.executable import Lowering, Member
from piper_jax.lowering.instruction import Instruction
from piper_jax.lowering.keys import Key
from piper_jax.lowering.local_program import LocalProgram
from piper_jax.lowering.placing import is_random_key
from piper_jax.lowering.programs import Compiled
from piper_jax.lowering.slots import Step, local_spec
from piper_jax.runtime.executor import Executor
from piper_jax.runtime.whole_program import Expected, WholeProgram, at_64_bits, relative_difference

MAX_ROWS = 24
_NOT_SHOWN = ("key", "step", "microbatch")
_GRADIENTS = ("accumulator", "unreduced")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeArray:
    """One array that a node reads or gives, of all replicas of its group.

    Attributes:
      name: such as ``value tanh.12``, ``cotangent of tanh.12``, ``parameter layers.1.kernel``, ``gradient ...``.
      value: activations, residuals and gradients are ``[replicas, ...]``; a gradient is what this node adds.
      difference: from one device, relative to the largest value there; None where one device has no such array.
    """

    name: str
    value: np.ndarray = field(repr=False)
    difference: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> str:
        return str(self.value.dtype)

    @property
    def norm(self) -> float:
        """The square root of the sum of squares."""
        return float(np.linalg.norm(at_64_bits(self.value)))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRun:
    """What ``train.run_node`` returns; prints as a table.

    Attributes:
      node: the node that ran.  group: its device group.  path, source: module path and the user's line.
      inputs, outputs: values and cotangents first, residuals last.
    """

    node: NodeId
    group: str
    path: str
    source: str
    inputs: tuple[NodeArray, ...]
    outputs: tuple[NodeArray, ...]

    @property
    def difference(self) -> float:
        """The largest difference of an output from one device."""
        found = [a.difference for a in self.outputs if a.difference is not None]
        return max((np.inf if np.isnan(d) else d for d in found), default=0.0)

    def __str__(self) -> str:
        at = f", {self.path} at {self.source}" if self.source else ""
        tables = [_rows("inputs", self.inputs), _rows("outputs", self.outputs)]
        widths = [max(len(row[k]) for rows in tables for row in rows) for k in range(5)]
        rows = [row for table in tables for row in table]
        lines = ["  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))).rstrip() for row in rows]
        return "\n".join([f"{self.node} on {self.group}{at}", *lines])


def _rows(title: str, arrays: Sequence[NodeArray]) -> list[tuple[str, ...]]:
    """Cells of a table: a row for each array, one for all residuals."""
    shown, kept = ([a for a in arrays if _is_kept(a.name) is so] for so in (False, True))
    rows = [(title, "shape", "dtype", "norm", "difference")]
    for a in shown[:MAX_ROWS]:
        difference = "-" if a.difference is None else f"{a.difference:.1e}"
        rows.append((f"  {a.name}", str(list(a.shape)), a.dtype, f"{a.norm:.4g}", difference))
    if len(shown) > MAX_ROWS:
        rows.append((f"  ... and {len(shown) - MAX_ROWS} more", "", "", "", ""))
    if kept:
        rows.append((f"  {len(kept)} residuals", "", "", f"{np.linalg.norm([a.norm for a in kept]):.4g}", "-"))
    return rows if arrays else [*rows, ("  none", "", "", "", "")]


def _is_kept(name: str) -> bool:
    return name.startswith(("residual ", "weight residual "))


def run_alone(
    lowering: Lowering, instructions: Iterable[Instruction], given: Mapping[Key, Any], node: NodeId
) -> NodeRun:
    """Runs what ``node`` needs, each node as a program of its own, then ``node``, and compares.

    Args:
      instructions: of a step or its gradients, in dispatch order; those between programs run as they are.
      given: state, batch and constants.
    """
    before, target = Alone(lowering).needed(instructions, node)
    kept = (*target.reads, *target.writes, *(k for i in before for k in i.writes if k.kind == "seed"))
    registers = {**given, **Executor([*before, target], tuple(dict.fromkeys(kept))).run(given)}
    context = lowering.context
    beside, op = _Beside(context=context, node=node, registers=registers), context.dag.ops[node.op]
    return NodeRun(
        node=node,
        group=str(context.dag.nodes[node].group),
        path=op.path,
        source=op.source,
        inputs=tuple(beside.arrays([k for k in target.reads if k.kind != "carried"])),
        outputs=tuple(beside.arrays(target.writes)),
    )


class Alone:
    """Every member of a slot as an instruction of its own; microbatches share programs."""

    def __init__(self, lowering: Lowering):
        self.lowering, self.context = lowering, lowering.context
        self.programs: dict[tuple[Any, ...], Compiled] = {}

    def needed(self, instructions: Iterable[Instruction], node: NodeId) -> tuple[list[Instruction], Instruction]:
        """What leads to ``node``, and its own instruction, which alone gives gradients and metrics."""
        before: list[tuple[Instruction, NodeId | None]] = []
        for instruction in instructions:
            if instruction.role != "compute":
                before.append((instruction, None))
                continue
            members = instruction.nodes
            here = node in members
            before += [(instruction, n) for n in (members[: members.index(node)] if here else members)]
            if here:
                break
        target = self.alone(node, with_sums=True)
        wanted, found = set(target.reads), []
        for instruction, inner in reversed(before):
            if inner is not None and not wanted.intersection(self.member(inner).writes):
                continue
            single = instruction if inner is None else self.alone(inner, with_sums=False)
            if wanted.intersection(single.writes):
                found.append(single)
                wanted = wanted.difference(single.writes).union(single.reads)
        return found[::-1], target

    def member(self, node: NodeId) -> Member:
        return self.lowering.member(node, set())

    def alone(self, node: NodeId, *, with_sums: bool) -> Instruction:
        """One node; sums over microbatches (gradients, metrics) start at zero, so that they are its own share."""
        known = self.member(node)
        added = known.added if isinstance(known, Step) else ()
        keys = (*known.reads, *known.writes)
        is_sum = {k: k in added or (k.kind == "unreduced" and isinstance(known, Step)) for k in keys}
        zeros = {k: local_spec(self.context, k) for k in known.reads if is_sum[k]}
        reads = tuple(k for k in known.reads if not is_sum[k])
        writes = tuple(k for k in known.writes if with_sums or not is_sum[k])

        def body(env: dict[Key, Any]) -> dict[Key, Any]:
            env = {**env, **{k: jnp.zeros(spec.shape, spec.dtype) for k, spec in zeros.items()}}
            known.run(env)
            return env

        shared = node.PASS if isinstance(known, Step) else node
        signature = known.group, node.op, shared, with_sums
        if signature not in self.programs:
            local = LocalProgram(label=f"{node} alone", reads=reads, writes=writes, body=body)
            self.programs[signature] = self.lowering.builder.compile(known.group, local)
        program = self.programs[signature]
        return Instruction(
            role="compute", label=program.label, call=program, reads=reads, writes=writes, nodes=(node,),
            program=program,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Beside:
    """Registers of one node with their names, and the same arrays from one device."""

    context: Context
    node: NodeId
    registers: Mapping[Key, Any]

    @property
    def mb(self) -> int:
        return self.node.MB or 0

    @cached_property
    def whole(self) -> WholeProgram:
        return WholeProgram(context=self.context, registers=self.registers)

    @cached_property
    def expected(self) -> Expected:
        return self.whole.run(self.mb)

    @cached_property
    def _shares(self) -> dict[str, tuple[Mapping[int, Any], Mapping[int, Any]]]:
        return {}

    def share_of(self, op: str) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
        if op not in self._shares:
            self._shares[op] = self.whole.share(op, self.mb, self.expected)
        return self._shares[op]

    def arrays(self, keys: Sequence[Key]) -> Iterator[NodeArray]:
        """What is shown of ``keys``; residuals last."""
        shown = [k for k in keys if k.kind not in _NOT_SHOWN and not is_random_key(self.registers[k])]
        for key in sorted(shown, key=lambda k: k.kind in ("residual", "crossing")):
            array = np.asarray(self.registers[key])
            if key.kind == "batch":
                array = array[self.mb]
            name, expected = self.known(key)
            if key.kind == "metric" and self.context.reduction_of(key) == "samples":
                array = array[:, self.mb]
            found = self._summed(key, array) if key.kind in _GRADIENTS else array
            difference = None if expected is None else relative_difference(found, expected)
            yield NodeArray(name=name, value=array, difference=difference)

    def _summed(self, key: Key, gradients: np.ndarray) -> np.ndarray:
        """Gradients of all replicas added up; of divided experts, all of these one after another."""
        parts = self.context.parts_of(key)
        total = at_64_bits(gradients).reshape(-1, parts, *gradients.shape[1:]).sum(0)
        return total.reshape(self.context.logical_spec(key).shape)

    def known(self, key: Key) -> tuple[str, Any]:
        """The name of a register, and what it is on one device, if it is anything there."""
        source, item = self.context.source, key.item
        match key.kind:
            case "value":
                return f"value {self.context.value_of[item]}", self.expected.values[item]
            case "cotangent":
                return self.cotangent(*item)
            case "accumulator" | "unreduced":
                return f"gradient {source.state.leaves[item].path}", self.gradient(item)
            case "state":
                leaf = source.state.leaves[item]
                return f"{'parameter' if leaf.kind == 'trainable' else leaf.kind} {leaf.path}", None
            case "batch" | "shared":
                return f"batch {source.batch.paths[item]}", None
            case "metric":
                return self.metric(key)
            case "carried":
                return f"carried {source.state.leaves[item].path}", self.expected.carried[item]
            case "residual":
                return f"residual {item[1]}", None
            case "crossing":
                return f"weight residual {item[1]}", None
            case "seed":
                return "1 / weight of the loss", None
            case _:
                return f"{key.kind} {item}", None

    def cotangent(self, value: int, giver: str) -> tuple[str, Any]:
        name = f"cotangent of {self.context.value_of[value]}"
        if len(self.context.cotangent_givers[value]) == 1:
            return name, self.expected.cotangents[value]
        return f"{name} from {giver}", self.share_of(giver)[0][value]

    def gradient(self, leaf: int) -> Any:
        readers = [op for op, chunk in self.context.chunk_of.items() if leaf in chunk.diff_state]
        return self.expected.gradients[leaf] if len(readers) == 1 else self.share_of(self.node.op)[1][leaf]

    def metric(self, key: Key) -> tuple[str, Any]:
        """A partial loss of this operation, or an auxiliary output; `last` is known for the last alone."""
        if isinstance(key.item, tuple):
            kind, op = key.item
            terms = self.context.chunk_of[op].terms
            parts = [self.expected.terms[i] for i in terms if self.context.program.terms[i][0] == kind]
            return f"{kind} of {op}", sum(at_64_bits(p) for p in parts)
        metric = self.context.program.metrics[key.item]
        missing = metric.kind == "last" and self.mb != self.context.num_microbatches - 1
        return f"metric {metric.path or 'aux'}", None if missing else self.expected.metrics[key.item]
