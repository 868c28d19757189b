"""One XLA program: traced under ``shard_map``, compiled once for all groups on which it is the same."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from piper_jax import _jax_compat
from piper_jax.lowering.group_mesh import TENSOR

_COLLECTIVE = re.compile(r"= [^=]*?\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


@dataclass(kw_only=True)
class Compiled:
    """A program that is compiled, or being compiled by another thread until it is first asked for.

    Attributes:
      label: what messages and profiles call it.
      digest: equal for programs whose lowered text is equal.
      resolve: waits for the executable.
    """

    label: str
    digest: str
    resolve: Callable[[], jax.stages.Compiled]

    @cached_property
    def executable(self) -> jax.stages.Compiled:
        return self.resolve()

    def __call__(self, *args: Any) -> Any:
        return self.executable(*args)

    def collectives(self) -> Counter[str]:
        """How many collectives of each kind its compiled text holds."""
        return Counter(found.replace("-", "_") for found in _COLLECTIVE.findall(self.hlo()))

    def hlo(self) -> str:
        """The compiled HLO text."""
        return self.executable.as_text()


@dataclass(kw_only=True)
class Compiler:
    """Compiles programs, each distinct one once and several at a time; equal ones on other devices re-use it.

    Attributes:
      donation: whether programs may overwrite their inputs' buffers.
      options: of XLA, by name.
      runs: False where executables are looked at and not called: one serves all devices, though it is of the first.
      stand_in: a mesh of the same shape to compile for in place of that of a group.
      num_compiles: XLA compilations so far.  num_shared: programs that re-used one.
    """

    donation: bool = True
    options: Mapping[str, bool | str] = field(default_factory=dict)
    runs: bool = True
    stand_in: Callable[[Mesh], Mesh] = lambda mesh: mesh
    num_compiles: int = 0
    num_shared: int = 0
    _known: dict[str, tuple[tuple[Any, ...], Future]] = field(default_factory=dict)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(os.cpu_count()))

    def compile(
        self,
        body: Callable[..., Sequence[Any]],
        *,
        label: str,
        mesh: Mesh,
        specs: Sequence[jax.ShapeDtypeStruct],
        in_specs: Sequence[P],
        out_specs: Sequence[P],
        donate: Sequence[int] = (),
        free: Sequence[int] = (),
    ) -> Compiled:
        """Compiles ``body``, a function of local arrays, for the devices of ``mesh``.

        Args:
          body: local inputs -> sequence of local outputs; may use the mesh axes by name.
          label: what messages and profiles call it.
          specs: GLOBAL shapes of the inputs.
          in_specs, out_specs: partitions of inputs and outputs over the mesh. ``body`` sees what lies along the tensor
            axis whole: XLA divides what works on it, and adds collectives.
          donate: positions of inputs whose buffers the outputs may take over.
          free: positions of outputs that XLA may divide over the tensor axis as it likes.
        """
        donate, mesh = tuple(donate) if self.donation else (), self.stand_in(mesh)

        def piper_program(*args: Any) -> tuple[Any, ...]:
            return tuple(body(*args))

        mapped = jax.shard_map(
            piper_program, mesh=mesh, in_specs=tuple(map(_manual, in_specs)), out_specs=tuple(map(_manual, out_specs)),
            axis_names={axis for axis in mesh.axis_names if axis != TENSOR or mesh.shape[axis] == 1}, check_vma=False,
        )  # fmt: skip
        outputs = (None if k in free else NamedSharding(mesh, spec) for k, spec in enumerate(out_specs))
        jitted = jax.jit(
            mapped,
            in_shardings=tuple(NamedSharding(mesh, spec) for spec in in_specs),
            out_shardings=tuple(outputs),
            donate_argnums=donate,
            keep_unused=True,
        )
        lowered = jitted.lower(*specs)
        digest = hashlib.sha256(f"{lowered.as_text()}{donate}".encode()).hexdigest()
        return Compiled(label=label, digest=digest, resolve=self._submit(lowered, digest, tuple(mesh.devices.flat)))

    def _submit(self, lowered: Any, digest: str, devices: tuple[Any, ...]) -> Callable[[], jax.stages.Compiled]:
        if digest not in self._known:
            self.num_compiles += 1
            self._known[digest] = devices, self._pool.submit(self._compile, lowered)
            return self._known[digest][1].result
        source, known = self._known[digest]

        def shared() -> jax.stages.Compiled:
            found = known.result()
            if source != devices and self.runs:
                found = _jax_compat.relocate(found, source, devices)
            if found is not None:
                self.num_shared += 1
                return found
            self.num_compiles += 1
            return self._compile(lowered)

        return shared

    def _compile(self, lowered: Any) -> jax.stages.Compiled:
        return lowered.compile(compiler_options=dict(self.options) or None)


def _manual(spec: P) -> P:
    """A partition without the tensor axis."""
    return P(*(None if part == TENSOR else part for part in spec))
