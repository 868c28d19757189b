"""Which compute XLA's own schedule puts beside each collective, and how much of its time that should take.

A collective that runs beside compute is a pair, such as ``all-gather-start`` and ``all-gather-done``, or an
``async-start`` around any, or on TPU v5e a chain of fusions; all others hold up what follows them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper_jax.errors import counted
from piper_jax.simulation.hardware import Hardware, Level
from piper_jax.simulation.topology import level_between
from piper_jax.targets.scheduled_hlo import COLLECTIVES, Instruction, Module

# What takes no time beside a collective: names, views, and the two ends of what runs by itself.
FREE = frozenset(
    {
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
        "opt-barrier", "copy-start", "copy-done", "slice-start", "slice-done", "async-start", "async-update",
        "async-done", "send", "send-done", "recv", "recv-done", "add-dependency", "domain",
    }
)  # fmt: skip
FREE_TARGETS = frozenset({"ConcatBitcast", "AllocateBuffer", "Sharding"})
SMALL_BYTES = 4096
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """An instruction that computes.

    Attributes:
      has_product: it is or holds a matrix product (or convolution).
      flops: of its matrix products, which take operands of ``dtype``.
      num_bytes: read and written.  cycles: estimated, on TPU.
      pass_name: what it is of, such as ``"F2"``.
    """

    has_product: bool
    flops: int
    dtype: str
    num_bytes: int
    cycles: int
    pass_name: str = ""

    def seconds(self, hardware: Hardware) -> float:
        """At the peak rates of ``hardware``."""
        return max(self.flops / hardware.peak(self.dtype), self.num_bytes / hardware.memory_bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """One collective of a compiled program.

    Attributes:
      kind: such as ``"all-gather"``.
      num_bytes: of the whole array on one device: gathered, or before it is scattered.
      group_size: devices that take part.
      is_asynchronous: whether compute may run beside it at all.
      beside: what runs from its start to its done, but for what works on less than ``SMALL_BYTES``.
      pass_name: what it is of, such as ``"F2"``.
    """

    name: str
    kind: str
    num_bytes: int
    group_size: int
    is_asynchronous: bool
    beside: tuple[Work, ...]
    pass_name: str = ""

    @property
    def num_products_of_others(self) -> int:
        """Matrix products beside it that are of another pass of the same slot."""
        return sum(w.has_product and w.pass_name not in ("", self.pass_name) for w in self.beside)

    @property
    def is_hidden(self) -> bool:
        """Whether any compute runs beside it."""
        return bool(self.beside)

    @property
    def num_products(self) -> int:
        """Instructions with a matrix product that run beside it."""
        return sum(work.has_product for work in self.beside)

    def seconds(self, hardware: Hardware, level: Level | None = None) -> float:
        """By itself, at the peak rates of ``hardware``.

        Args:
          level: that it crosses; by default the one between as many neighbours.
        """
        level = level or level_between(hardware, range(max(self.group_size, 1)))
        share, steps = 1 - 1 / max(self.group_size, 1), math.ceil(math.log2(max(self.group_size, 1)))
        match self.kind:
            case "all-reduce":
                return 2 * (share * self.num_bytes / level.ring_bandwidth + steps * level.latency_seconds)
            case "all-gather" | "reduce-scatter":
                return share * self.num_bytes / level.ring_bandwidth + steps * level.latency_seconds
            case _:
                return (share or 1) * self.num_bytes / level.bandwidth + level.latency_seconds

    def cover(self, hardware: Hardware, level: Level | None = None) -> float:
        """The time of the compute beside it, as a part of its own: at 1 and above it can be hidden as a whole."""
        return sum(work.seconds(hardware) for work in self.beside) / self.seconds(hardware, level)

    def text(self) -> str:
        """What runs beside it, counted."""
        others = len(self.beside) - self.num_products
        cycles = sum(work.cycles for work in self.beside)
        counts = {"matrix product": self.num_products, "other": others}
        beside = ", ".join(counted(number, what) for what, number in counts.items() if number)
        return (beside or "nothing") + (f", {counted(cycles, 'cycle')}" if cycles else "")


def work_of(module: Module) -> tuple[Work, ...]:
    """Everything that a program computes, but for what works on less than ``SMALL_BYTES``."""
    known = module.computations.get(module.entry, {})
    return tuple(work for i in known.values() if (work := _work(module, known, i)) is not None)


def collective_uses(module: Module) -> tuple[CollectiveUse, ...]:
    """All collectives of a module, in the order of its text."""
    every = [i for computation in module.computations.values() for i in computation.values()]
    wrapped = {name for i in every if i.opcode in ("async-start", "fusion") for name in i.called}
    found = ((n, c) for n, c in module.computations.items() if n not in wrapped)
    return tuple(use for _, computation in found for use in _uses(module, computation))


def _uses(module: Module, known: dict[str, Instruction]) -> Iterator[CollectiveUse]:
    order = list(known.values())
    for position, instruction in enumerate(order):
        started = _collective(module, instruction)
        if started is None:
            continue
        done = _done(order, position) if instruction.is_start else None
        asynchronous = done is not None and not instruction.is_synchronous
        given = sum(known[name].nbytes for name in instruction.operands if name in known)
        between = order[position + 1 : done] if asynchronous else []
        yield CollectiveUse(
            name=instruction.name,
            kind=started.opcode.removesuffix("-start"),
            num_bytes=max(given, order[position if done is None else done].nbytes),
            group_size=started.group_size,
            is_asynchronous=asynchronous,
            beside=tuple(work for i in between if (work := _work(module, known, i)) is not None),
            pass_name=started.pass_name or instruction.pass_name,
        )


def _collective(module: Module, instruction: Instruction) -> Instruction | None:
    """The collective that an instruction is or starts; None for others, dones included."""
    if instruction.opcode.removesuffix("-start") in COLLECTIVES:
        return instruction
    wraps = instruction.opcode in ("async-start", "fusion") and not (instruction.is_done or instruction.carries)
    inside = module.inside(instruction) if wraps else ()
    return next((found for i in inside if (found := _collective(module, i)) is not None), None)


def _done(order: Sequence[Instruction], start: int) -> int | None:
    """The position of the done of a start, through what carries it."""
    names = {order[start].name}
    for position in range(start + 1, len(order)):
        instruction = order[position]
        if names.isdisjoint(instruction.operands):
            continue
        if instruction.is_done:
            return position
        if instruction.carries:
            names.add(instruction.name)
    return None


def _work(module: Module, known: dict[str, Instruction], instruction: Instruction) -> Work | None:
    base = instruction.opcode.removesuffix("-start").removesuffix("-done")
    if instruction.opcode in FREE or base in COLLECTIVES or instruction.custom_target in FREE_TARGETS:
        return None
    if instruction.is_start or instruction.is_done:
        return None
    products = module.products(instruction, known)
    num_bytes = instruction.nbytes + sum(known[name].nbytes for name in instruction.operands if name in known)
    if not products and num_bytes <= SMALL_BYTES:
        return None
    dtypes = [product.dtype for product in products] or [array.dtype for array in instruction.arrays] or [""]
    return Work(
        has_product=bool(products), flops=sum(product.flops for product in products),
        dtype=DTYPES.get(dtypes[0], dtypes[0]), num_bytes=num_bytes, cycles=instruction.estimated_cycles,
        pass_name=instruction.pass_name,
    )  # fmt: skip
