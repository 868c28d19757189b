"""One XLA program: traced under ``shard_map``, compiled once for all groups on which it is the same."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
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
    _digests: dict[Hashable, str] = field(default_factory=dict)
    _known: dict[Hashable, tuple[tuple[Any, ...], Future]] = field(default_factory=dict)
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
        same: Hashable | None = None,
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
          same: equal for bodies that are the same function; the first of them is lowered for all, on equal meshes.
        """
        donate, mesh = tuple(donate) if self.donation else (), self.stand_in(mesh)
        in_specs, out_specs, devices = tuple(in_specs), tuple(out_specs), tuple(mesh.devices.flat)
        kind = same, tuple(mesh.shape.items()), tuple(specs), in_specs, out_specs, donate, tuple(free)
        lower = partial(_lowered, body, mesh, specs, in_specs, out_specs, donate, free)
        digest = None if same is None else self._digests.get(kind)
        if digest is None or self._place(digest, devices) not in self._known:
            lowered = lower()
            lower = lambda: lowered  # noqa: E731
            digest = digest or hashlib.sha256(f"{lowered.as_text()}{donate}".encode()).hexdigest()
            if same is not None:
                self._digests[kind] = digest
        return Compiled(label=label, digest=digest, resolve=self._submit(digest, devices, lower))

    def _place(self, digest: str, devices: tuple[Any, ...]) -> Hashable:
        """Where an executable is looked for: one serves all devices if it can be moved between them, or is not run."""
        moves = not self.runs or _jax_compat.can_relocate(devices)
        return digest, None if moves else devices

    def _submit(
        self, digest: str, devices: tuple[Any, ...], lower: Callable[[], jax.stages.Lowered]
    ) -> Callable[[], jax.stages.Compiled]:
        """Compiles what is new; else waits for the known executable, and compiles again if it can't be moved."""
        place = self._place(digest, devices)
        if place not in self._known:
            self.num_compiles += 1
            self._known[place] = devices, self._pool.submit(self._compile, lower())
            return self._known[place][1].result
        source, known = self._known[place]

        def shared() -> jax.stages.Compiled:
            found = known.result()
            if source != devices and self.runs:
                found = _jax_compat.relocate(found, source, devices)
            if found is not None:
                self.num_shared += 1
                return found
            self.num_compiles += 1
            return self._compile(lower())

        return shared

    def _compile(self, lowered: Any) -> jax.stages.Compiled:
        return lowered.compile(compiler_options=dict(self.options) or None)


def _lowered(
    body: Callable[..., Sequence[Any]],
    mesh: Mesh,
    specs: Sequence[jax.ShapeDtypeStruct],
    in_specs: Sequence[P],
    out_specs: Sequence[P],
    donate: Sequence[int],
    free: Sequence[int],
) -> jax.stages.Lowered:
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
        donate_argnums=tuple(donate),
        keep_unused=True,
    )
    return jitted.lower(*specs)


def _manual(spec: P) -> P:
    """A partition without the tensor axis."""
    return P(*(None if part == TENSOR else part for part in spec))
