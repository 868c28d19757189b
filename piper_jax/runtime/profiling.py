"""Measures one step as it runs: when each program and transfer ended, and what each group held."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import jax

from piper_jax.lowering.context import Context
from piper_jax.lowering.instruction import Instruction, last_uses
from piper_jax.lowering.keys import Key
from piper_jax.simulation.report import MEMORY_KINDS, GroupMemory, MemoryStep, Span

_SPAN_KIND = {
    "transfer": "send",
    "exchange": "all_gather",
    "joint": "all_reduce",
    "update": "update",
    "reduce": "update",
}
_MEMORY_KIND = {
    "state": "parameters", "optimizer": "optimizer", "accumulator": "gradients", "gradient": "gradients",
    "unreduced": "gradients", "carried": "parameters", "batch": "batch", "shared": "batch",
}  # fmt: skip
_ACTIVATIONS = ("value", "cotangent", "residual", "crossing", "dispatched", "dispatched_cotangent")


@dataclass(slots=True)
class _Stream:
    """Waits for the results of one stream in order, and notes when each was there."""

    queue: SimpleQueue = field(default_factory=SimpleQueue)
    ends: list[float] = field(default_factory=list)

    def watch(self) -> None:
        while (results := self.queue.get()) is not None:
            jax.block_until_ready(results)
            self.ends.append(time.perf_counter())


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured: spans with times in seconds on one clock, and memory by group."""

    spans: tuple[Span, ...]
    memory: dict[str, GroupMemory]
    registers: dict[Key, Any]


def profile(
    context: Context, instructions: Sequence[Instruction], given: Mapping[Key, Any], wanted: Sequence[Key]
) -> Profile:
    """Dispatches as the executor does, with one waiting thread for each group and each link.

    A span starts when its inputs were there and its stream was free. The programs must not donate, since the threads
    hold their results; memory that a step would re-use is counted once.
    """
    streams: dict[str, _Stream] = {}
    for instruction in instructions:
        streams.setdefault(_stream(instruction), _Stream())
    threads = [threading.Thread(target=s.watch, daemon=True) for s in streams.values()]
    for thread in threads:
        thread.start()
    registers, dispatched, memory = dict(given), [], {g: [] for g in context.meshes}
    moved = {k for i in instructions if i.role == "transfer" for k in (*i.reads, *i.writes)}
    begin = time.perf_counter()
    for instruction, dead in zip(instructions, last_uses(instructions, wanted), strict=True):
        dispatched.append(time.perf_counter())
        results = instruction.call(*[registers[k] for k in instruction.reads])
        streams[_stream(instruction)].queue.put(results)
        registers.update(zip(instruction.writes, results, strict=True))
        for key in set(instruction.overwrites).intersection(dead):
            registers.pop(key)
        _sample(context, registers, moved, memory, dispatched[-1] - begin)
        for key in dead:
            if kind_of(key) != "batch":  # held by the caller for as long as a step is dispatched
                registers.pop(key, None)
    for stream in streams.values():
        stream.queue.put(None)
    for thread in threads:
        thread.join()
    spans = _spans(instructions, dispatched, streams)
    return Profile(
        spans=tuple(spans),
        memory={g: GroupMemory(steps=tuple(steps)) for g, steps in memory.items()},
        registers={k: registers[k] for k in wanted},
    )


def _stream(instruction: Instruction) -> str:
    return instruction.label if instruction.role == "transfer" else "+".join(_groups(instruction))


def _groups(instruction: Instruction) -> list[str]:
    keys = instruction.reads if instruction.role == "transfer" else (*instruction.writes, *instruction.reads)
    return list(dict.fromkeys(k.group for k in keys))


def _spans(
    instructions: Sequence[Instruction], dispatched: Sequence[float], streams: Mapping[str, _Stream]
) -> list[Span]:
    position = dict.fromkeys(streams, 0)
    ready: dict[Key, float] = {}
    free: dict[str, float] = {}
    spans = []
    for instruction, begun in zip(instructions, dispatched, strict=True):
        name = _stream(instruction)
        end = streams[name].ends[position[name]]
        position[name] += 1
        busy = [free.get(g, 0.0) for g in ([name] if instruction.role == "transfer" else _groups(instruction))]
        start = min(max(begun, *busy, *(ready.get(k, 0.0) for k in instruction.reads), 0.0), end)
        ready.update(dict.fromkeys(instruction.writes, end))
        free.update(dict.fromkeys([name] if instruction.role == "transfer" else _groups(instruction), end))
        kind = _SPAN_KIND.get(instruction.role, "compute")
        stream = "send" if instruction.role == "transfer" else "compute"
        if instruction.nodes:
            spans += [Span(g, stream, kind, instruction.nodes, start, end) for g in _groups(instruction)]
    return spans


def kind_of(key: Key) -> str | None:
    """The kind of memory that a register counts as; None for metrics, keys and what else is not counted."""
    return "activations" if key.kind in _ACTIVATIONS else _MEMORY_KIND.get(key.kind.removesuffix("_shard"))


def num_parts(context: Context, key: Key) -> int:
    """Over how many devices of its group a register is divided."""
    layout, tensor = context.layout(key), 1 if context.tensor_dim(key) is None else context.tensor
    devices = context.meshes[key.group].replicas
    divided = {"stacked": devices, "batch": devices, "experts": context.parts_of(key)}
    return tensor * divided.get(layout, 1)


def _sample(
    context: Context,
    registers: Mapping[Key, Any],
    moved: Collection[Key],
    memory: Mapping[str, list[MemoryStep]],
    now: float,
) -> None:
    sizes: dict[str, dict[str, int]] = {g: {} for g in memory}
    for key, array in registers.items():
        kind = "transfers" if key in moved else kind_of(key)
        if kind is not None:
            size = sizes[key.group]
            size[kind] = size.get(kind, 0) + array.nbytes // num_parts(context, key)
    for group, size in sizes.items():
        fields = {k: size.get(k, 0) for k in MEMORY_KINDS}
        memory[group].append(MemoryStep(time=now, **fields))
