"""What compiling for a target shows: each program's memory and work, and which collectives are hidden."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from piper_jax.device_map import DeviceMap
from piper_jax.errors import counted
from piper_jax.ir.columns import aligned, bytes_text
from piper_jax.ir.ids import NodeId
from piper_jax.simulation.hardware import HARDWARE, Hardware, Level
from piper_jax.simulation.topology import level_of
from piper_jax.targets.overlap import CollectiveUse, Work
from piper_jax.targets.profiles import Target

MAX_LABEL = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramReport:
    """One distinct program.

    Attributes:
      num_runs: how many dispatches of a step run it, on all its groups together.
      nodes: of the plan, that each of these runs.
      argument_bytes, output_bytes, temporary_bytes: on one device; ``alias_bytes`` of the outputs lie in arguments.
      flops: of one run on one device.  accessed_bytes: read and written, by XLA's count; 0 where it gives none.
      work: the instructions that compute, in the order of the schedule.
      is_alone: it holds no compute beside which a collective could run.
    """

    label: str
    role: str
    groups: tuple[str, ...]
    num_runs: int
    nodes: tuple[tuple[NodeId, ...], ...]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    flops: float
    accessed_bytes: float
    work: tuple[Work, ...]
    collectives: tuple[CollectiveUse, ...]
    is_alone: bool

    @property
    def cycles(self) -> int:
        """What the compiler for TPU expects its work to take; 0 for others."""
        return sum(work.cycles for work in self.work)

    @property
    def peak_bytes(self) -> int:
        """Of this program by itself, without what else is on the device."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReport:
    """A plan compiled for a target. ``print`` shows it.

    Attributes:
      num_devices: that the plan uses.  device_map: where they are.
      options: of the compiler.
      num_transfers: between groups; they run no program.
      seconds: that lowering and compiling took here.
    """

    target: Target
    num_devices: int
    device_map: DeviceMap
    options: Mapping[str, bool | str]
    programs: tuple[ProgramReport, ...]
    num_transfers: int
    seconds: float

    @property
    def collectives(self) -> tuple[tuple[ProgramReport, CollectiveUse], ...]:
        """Every collective of every distinct program."""
        return tuple((program, use) for program in self.programs for use in program.collectives)

    @property
    def num_collectives(self) -> int:
        """Collectives of one step."""
        return sum(program.num_runs for program, _ in self.collectives)

    @property
    def num_hidden(self) -> int:
        """Those beside which any compute runs."""
        return sum(program.num_runs for program, use in self.collectives if use.is_hidden)

    @property
    def num_under_products(self) -> int:
        """Those beside which a matrix product runs."""
        return sum(program.num_runs for program, use in self.collectives if use.num_products)

    @property
    def hardware(self) -> Hardware | None:
        """Peak rates to estimate with: of GPUs only, since the text for TPU has cycles."""
        return HARDWARE.get(self.target.chip.name) if self.target.family == "gpu" else None

    def level(self, program: ProgramReport, use: CollectiveUse, hardware: Hardware) -> Level:
        """The slowest level that a collective crosses on any of the program's groups, where the map has put them."""
        groups = [self.device_map.dag.groups[name].devices for name in program.groups]
        if use.group_size > min(map(len, groups), default=0):  # between groups
            groups = [tuple(device for devices in groups for device in devices)]
        layout = self.device_map.layout
        return level_of(
            hardware, max((layout.level(devices[: use.group_size]) for devices in groups if devices), default=0)
        )

    def cover(self, program: ProgramReport, use: CollectiveUse) -> float | None:
        """The time of the compute beside a collective as a part of its own; None without any, or without rates."""
        if self.hardware is None or not use.is_hidden:
            return None
        return use.cover(self.hardware, self.level(program, use, self.hardware))

    def verdict(self, program: ProgramReport, use: CollectiveUse) -> str:
        """``hidden``, ``hidden in part`` (the compute beside it should take less time) or ``exposed``, and why."""
        if use.is_hidden:
            return "hidden in part" if (self.cover(program, use) or 1.0) < 1 else "hidden"
        if program.is_alone:
            return "exposed: alone in its program"
        return "exposed" if use.is_asynchronous else "exposed: synchronous"

    def __str__(self) -> str:
        placement = [] if self.device_map.topology.is_flat else [str(self.device_map), ""]
        programs = [*self._programs(), *self._collectives()]
        return "\n".join([*self._heading(), "", *placement, *programs, "", self._summary()])

    def _heading(self) -> Iterable[str]:
        runs = sum(p.num_runs for p in self.programs)
        devices = f"{self.num_devices} of {counted(self.target.num_devices, 'device')}"
        programs, transfers = counted(len(self.programs), "program"), counted(self.num_transfers, "transfer")
        counts = f"{programs}, {counted(runs, 'run')} and {transfers} a step"
        yield f"target   {self.target}, {devices}: {counts}; lowered and compiled in {self.seconds:.1f} s"
        chosen = " ".join(f"{name}={str(value).lower()}" for name, value in self.options.items())
        yield f"options  {chosen or 'none; the defaults of the compiler'}"

    def _programs(self) -> Iterable[str]:
        header = ("program", "on", "runs", "GFLOP", "arguments", "outputs", "reused", "temporary", "collectives")
        rows = [
            (
                _short(p.label), _groups(p.groups), str(p.num_runs), f"{p.flops / 1e9:.2f}",
                *map(bytes_text, (p.argument_bytes, p.output_bytes, p.alias_bytes, p.temporary_bytes)),
                str(len(p.collectives)),
            )
            for p in self.programs
        ]  # fmt: skip
        yield from aligned(header, rows, left=2)

    def _collectives(self) -> Iterable[str]:
        rows = [
            (
                _short(p.label), u.kind, str(p.num_runs), bytes_text(u.num_bytes),
                "" if (cover := self.cover(p, u)) is None else f"{cover:.2f}", u.text(), self.verdict(p, u),
            )
            for p, u in self.collectives
        ]  # fmt: skip
        if rows:
            yield ""
            header = ("program", "collective", "runs", "bytes", "cover", "between its start and its done", "")
            yield from aligned(header, rows, left=2, left_from=5)

    def _summary(self) -> str:
        if not self.num_collectives:
            return "no collectives"
        hidden = f"{self.num_hidden} of {self.num_collectives} collectives of a step run beside compute"
        whole = sum(p.num_runs for p, u in self.collectives if self.verdict(p, u) == "hidden")
        estimate = f"; by peak rates {whole} are hidden as a whole" if self.hardware is not None else ""
        return f"{hidden}, {self.num_under_products} of them beside matrix products{estimate}"


def _short(label: str) -> str:
    return label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 3]}..."


def _groups(names: Sequence[str]) -> str:
    return ",".join(names) if len(names) < 4 else f"{names[0]}..{names[-1]}"
