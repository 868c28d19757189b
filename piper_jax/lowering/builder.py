"""Compiles functions of local arrays into instructions for one group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.ir.ids import NodeId
from piper_jax.lowering.between_processes import Wire
from piper_jax.lowering.context import Context
from piper_jax.lowering.group_mesh import SLICE, P
from piper_jax.lowering.instruction import Instruction, Role
from piper_jax.lowering.keys import PER_SLICE, Key
from piper_jax.lowering.local_program import LocalProgram
from piper_jax.lowering.programs import Compiled, Compiler
from piper_jax.lowering.slots import local_spec
from piper_jax.lowering.updates import GroupUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """The context of a lowering, with the compiler and the updates of its groups.

    ``chosen`` are the partitions of what a program left to the compiler, ``wire`` orders what several processes run.
    """

    context: Context
    compiler: Compiler
    updates: Mapping[str, GroupUpdate]
    wire: Wire
    chosen: dict[tuple[str, Any], P] = field(default_factory=dict)

    def local(self, role: Role, group: str, local: LocalProgram, nodes: tuple[NodeId, ...] = ()) -> Instruction:
        """An instruction that runs ``local`` on ``group``."""
        local = local.chained(group) if self.context.needs_tokens else local
        program = self.compile(group, local)
        return Instruction(
            role=role, label=local.label, call=program, reads=local.reads, writes=local.writes, nodes=nodes,
            program=program, overwrites=self.overwritten(local.reads, local.writes),
        )  # fmt: skip

    def compile(self, group: str, local: LocalProgram, same: Hashable | None = None) -> Compiled:
        """The executable of a local program on a group; what it overwrites is donated.

        Args:
          same: equal for programs whose bodies are the same functions.
        """
        mesh = self.context.meshes[group]
        taken = self.overwritten(local.reads, local.writes)

        free = [k for k, key in enumerate(local.writes) if self._is_free(key)]
        body = _on_slices(local, self.context.slices_on(group))
        program = self.compiler.compile(
            body, label=local.label, mesh=mesh.mesh, specs=[self.global_spec(k) for k in local.reads],
            in_specs=[self._partition(k) for k in local.reads], out_specs=[self._partition(k) for k in local.writes],
            donate=[k for k, key in enumerate(local.reads) if key in taken],
            free=free, same=same,
        )  # fmt: skip
        for k in free:
            key = local.writes[k]
            self.chosen[key.kind, key.item] = program.executable.output_shardings[k].spec
        return program

    def _partition(self, key: Key) -> P:
        return self.chosen.get((key.kind, key.item)) or self.context.partition(key)

    def _is_free(self, key: Key) -> bool:
        """Whether the compiler may choose how the tensor axis divides a register: what F keeps for B, and BI for BW.

        The first program that writes it decides, so it is compiled before those that read it are lowered.
        """
        kept = key.kind in ("residual", "crossing") and self.context.tensor > 1
        return kept and (key.kind, key.item) not in self.chosen

    def overwritten(self, reads: Iterable[Key], writes: Collection[Key]) -> tuple[Key, ...]:
        """The inputs of a program whose memory its outputs take over."""
        return tuple(key for key in reads if self._is_overwritten(key, writes))

    def _is_overwritten(self, key: Key, writes: Collection[Key]) -> bool:
        """Whether an output has the use and the layout of this input: itself, or gradient for accumulator and back."""
        if key.kind == "token":
            return False
        if key in writes:
            return True
        one, _, form = key.kind.partition("_")
        other = {"accumulator": "gradient", "gradient": "accumulator"}.get(one)
        twin = key._replace(kind=f"{other}_{form}".rstrip("_") if other else key.kind)  # type: ignore[arg-type]
        return twin in writes and local_spec(self.context, twin).dtype == local_spec(self.context, key).dtype

    def global_spec(self, key: Key) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a register."""
        if key.kind == "gathered":
            exchanges = self.updates[key.group].exchanges
            rows = sum(self.context.meshes[g].replicas for g in exchanges.participants)
            return jax.ShapeDtypeStruct((rows, exchanges.width(key.item)), jnp.uint32)
        local = local_spec(self.context, key)
        return jax.ShapeDtypeStruct(self.context.register_shape(key, local.shape), local.dtype)


def _on_slices(local: LocalProgram, count: int) -> Callable[..., list[Any]]:
    """A function of what one device holds, from one of a single slice; ``count`` slices are mapped along an axis."""

    def one(*args: Any) -> list[Any]:
        out = local.body(dict(zip(local.reads, args, strict=True)))
        return [jnp.asarray(out[key]) for key in local.writes]

    inner, outer = ([_slice_dim(key) for key in keys] for keys in (local.reads, local.writes))
    several = count > 1 and any(dim is not None for dim in (*inner, *outer))

    def body(*args: Any) -> list[Any]:
        views = [
            a if several and dim is not None else _single(key, a)
            for key, dim, a in zip(local.reads, inner, args, strict=True)
        ]
        if several:
            numbered = jax.vmap(lambda _, *views: one(*views), (0, *inner), outer, axis_name=SLICE)
            values = numbered(jnp.arange(count), *views)
        else:
            values = one(*views)
        return [
            v[None] if key.layout == "stacked" and not (several and dim is not None) else v
            for key, dim, v in zip(local.writes, outer, values, strict=True)
        ]

    return body


def _single(key: Key, array: Any) -> Any:
    """The only entry of what a device holds."""
    return array[:, 0] if key.layout == "batch" else array[0] if key.layout == "stacked" else array


def _slice_dim(key: Key) -> int | None:
    """The dimension of the slices in what a device holds of a register; None for what all of its slices share."""
    return 1 if key.layout == "batch" else 0 if key.kind in PER_SLICE else None
