"""One XLA program: traced under ``shard_map``, compiled once for all groups on which it is the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from piper_jax import _jax_compat


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """An executable with what reports need: a label, the lowered text's hash, and whether XLA compiled it here."""

    label: str
    call: Callable[..., Any]
    executable: jax.stages.Compiled
    digest: str

    def hlo(self) -> str:
        """The compiled HLO text."""
        return self.executable.as_text()


@dataclass(slots=True, kw_only=True)
class Compiler:
    """Compiles programs, each distinct one once; equal ones on other devices re-use the executable.

    Attributes:
      donation: whether programs may overwrite their inputs' buffers.
      num_compiles: XLA compilations so far.  num_shared: programs that re-used one.
    """

    donation: bool = True
    num_compiles: int = 0
    num_shared: int = 0
    known: dict[str, tuple[tuple[Any, ...], jax.stages.Compiled]] = field(default_factory=dict)

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
    ) -> Compiled:
        """Compiles ``body``, a function of local arrays, for the devices of ``mesh``.

        Args:
          body: local inputs -> sequence of local outputs; may use the mesh axes by name.
          label: what messages and profiles call it.
          specs: GLOBAL shapes of the inputs.
          in_specs, out_specs: partitions of inputs and outputs over the mesh.
          donate: positions of inputs whose buffers the outputs may take over.
        """

        donate = tuple(donate) if self.donation else ()

        def piper_program(*args: Any) -> tuple[Any, ...]:
            return tuple(body(*args))

        mapped = jax.shard_map(
            piper_program, mesh=mesh, in_specs=tuple(in_specs), out_specs=tuple(out_specs), check_vma=False
        )
        shardings = [[NamedSharding(mesh, spec) for spec in found] for found in (in_specs, out_specs)]
        jitted = jax.jit(
            mapped,
            in_shardings=tuple(shardings[0]),
            out_shardings=tuple(shardings[1]),
            donate_argnums=donate,
            keep_unused=True,
        )
        lowered = jitted.lower(*specs)
        digest = hashlib.sha256(f"{lowered.as_text()}{donate}".encode()).hexdigest()
        executable = self._executable(lowered, digest, tuple(mesh.devices.flat))
        return Compiled(label=label, call=executable, executable=executable, digest=digest)

    def _executable(self, lowered: Any, digest: str, devices: tuple[Any, ...]) -> jax.stages.Compiled:
        if digest in self.known:
            source, known = self.known[digest]
            shared = known if source == devices else _jax_compat.relocate(known, source, devices)
            if shared is not None:
                self.num_shared += 1
                return shared
        self.num_compiles += 1
        compiled = lowered.compile()
        self.known.setdefault(digest, (devices, compiled))
        return compiled
