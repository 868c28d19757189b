"""The text of a compiled XLA module as data: instructions in the order in which they run. Imports no JAX.

Only this file knows how the text is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
MATRIX_PRODUCTS = frozenset({"dot", "convolution", "ragged-dot", "scaled-dot"})
MATRIX_LIBRARIES = re.compile(r"cublas|cudnn|matmul|gemm|conv", re.IGNORECASE)

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e[0-9]m[0-9][a-z]*)?)\[([0-9,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")
_CONTRACTED = re.compile(r'lhs_contracting_(?:dims=\{|dimensions":\[)([0-9,"]*)')
_GROUP = re.compile(r"replica_groups=(?:\{\{([0-9,]+)\}|\[\d+,(\d+)\])")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_PASS = re.compile(r'op_name="[^"]*?/((?:F|B|BI|BW)\d*)/')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True, slots=True)
class Array:
    """An array in the text of a shape."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        found = re.search(r"\d+", self.dtype)
        bits = 8 if self.dtype == "pred" else int(found[0]) if found else 0
        return math.prod(self.sizes) * bits // 8


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation.

    Attributes:
      result: the text of its shape.  operands: names.  rest: what follows the opcode's opening parenthesis.
    """

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    rest: str

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """What it makes, tuples taken apart and layouts left aside."""
        return tuple(Array(dtype, _numbers(sizes)) for dtype, sizes in _ARRAY.findall(self.result))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Computations that it calls."""
        return tuple(name for group in _CALLED.findall(self.rest) for name in _NAME.findall(group))

    @property
    def estimated_cycles(self) -> int:
        """What the compiler for TPU expects; 0 where it says nothing."""
        return _first(_CYCLES, self.rest, 0)

    @property
    def pass_name(self) -> str:
        """The pass and stage that it comes from, such as ``F2``; empty for what is of none."""
        found = _PASS.search(self.rest)
        return found[1] if found else ""

    @property
    def trip_count(self) -> int:
        """Of a loop, where it is known; else 1."""
        return _first(_TRIPS, self.rest, 1)

    @property
    def is_synchronous(self) -> bool:
        """Whether a start waits for its own done, though it is written as a pair."""
        return '"is_sync":true' in self.rest

    @property
    def is_start(self) -> bool:
        """Whether it starts what a done ends; on TPU v5e the two may be fusions."""
        return self.opcode.endswith("-start") or self.name.startswith("async-collective-start")

    @property
    def is_done(self) -> bool:
        return self.opcode.endswith("-done") or self.name.startswith("async-collective-done")

    @property
    def carries(self) -> bool:
        """Whether it hands on what is started and not done: an update, a view, or a TPU fusion with a part of it."""
        parts = any(name.startswith("async_collective_fusion") for name in self.called)
        return parts or self.opcode.endswith("-update") or self.opcode in ("get-tuple-element", "bitcast")

    @property
    def group_size(self) -> int:
        """How many devices take part in a collective; 0 where the text does not list them."""
        found = _GROUP.search(self.rest)
        return 0 if found is None else len(found[1].split(",")) if found[1] else int(found[2])

    @property
    def is_matrix_product(self) -> bool:
        """Whether it is one itself, or calls a library for one."""
        return self.opcode in MATRIX_PRODUCTS or bool(MATRIX_LIBRARIES.search(self.custom_target))

    @property
    def custom_target(self) -> str:
        """What a custom call names; empty for others."""
        found = _TARGET.search(self.rest) if self.opcode == "custom-call" else None
        return found[1] if found else ""

    @property
    def contracted(self) -> tuple[int, ...]:
        """Contracted dimensions of the left operand of a matrix product."""
        found = _CONTRACTED.search(self.rest)
        return _numbers(found[1]) if found else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product; ``flops`` is 0 where the text does not tell them, ``dtype`` is that of its left operand."""

    flops: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Module:
    """The instructions of each computation, in the order in which they run; ``entry`` is where it starts."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> Module:
        """The module that the text of a compiled program shows."""
        computations: dict[str, dict[str, Instruction]] = {}
        entry, current = "", None
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                current = computations.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (found := _INSTRUCTION.match(line)):
                name, result, opcode, rest = found.groups()
                operands = tuple(_NAME.findall(_arguments(rest)))
                current[name] = Instruction(name=name, opcode=opcode, result=result, operands=operands, rest=rest)
        return cls(computations=computations, entry=entry)

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions of the computations that it calls."""
        return (i for name in instruction.called for i in self.computations.get(name, {}).values())

    def products(self, instruction: Instruction, known: dict[str, Instruction]) -> tuple[Product, ...]:
        """The matrix products that an instruction is or holds.

        Args:
          known: the computation in which the instruction is.
        """
        if instruction.is_matrix_product:
            return (_product(instruction, known),)
        return tuple(
            Product(flops=product.flops * instruction.trip_count, dtype=product.dtype)
            for name in instruction.called
            for product in self.products_of(name)
        )

    def products_of(self, computation: str) -> tuple[Product, ...]:
        """All matrix products of a computation and of what it calls."""
        known = self.computations.get(computation, {})
        return tuple(product for i in known.values() for product in self.products(i, known))


def _product(instruction: Instruction, known: dict[str, Instruction]) -> Product:
    """Two operations for each element of the result and of the contracted dimensions, where the text names them."""
    left = next((known[name].arrays[:1] for name in instruction.operands[:1] if name in known), ())
    if not left or not instruction.arrays or not instruction.contracted:
        return Product(flops=0, dtype=left[0].dtype if left else "")
    contracted = math.prod(left[0].sizes[k] for k in instruction.contracted)
    return Product(flops=2 * math.prod(instruction.arrays[0].sizes) * contracted, dtype=left[0].dtype)


def _arguments(rest: str) -> str:
    """What comes before the parenthesis that closes the one before ``rest``."""
    depth = 1
    for position, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return rest[:position]
    return rest


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _first(pattern: re.Pattern[str], text: str, otherwise: int) -> int:
    found = pattern.search(text)
    return int(found[1]) if found else otherwise
