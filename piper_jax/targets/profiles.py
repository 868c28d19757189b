"""Hardware that a plan can be compiled for where it is not: chips, legal shapes, compiler options. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from piper_jax.errors import ConfigError, suggest
from piper_jax.topology import Topology

Family = Literal["gpu", "tpu", "cpu"]
EXAMPLES = "gpu:h100:1x8 (nodes x GPUs of a node), tpu:v5p:2x2x2 (chips along each axis) or cpu"
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of chip.

    Attributes:
      axes: how many numbers its shapes have.
      devices: JAX devices of one chip.
      flops_per_cycle: of its matrix units in bfloat16, on one device; 0 where no cycles are estimated.
      options: of the compiler, for this chip alone.
      config: for GPUs, the text of the compiler's device description (``GpuTargetConfigProto``).
    """

    name: str
    axes: int
    devices: int = 1
    flops_per_cycle: int = 0
    options: Mapping[str, bool | str] = field(default_factory=dict)
    config: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """What all chips of a family have in common.

    Attributes:
      backend: the name under which JAX knows its compiler.
      package: what must be importable; ``extra`` installs it. Empty where it comes with JAX.
      environment: variables to be set before the compiler is first used.
      options: of the compiler.
    """

    backend: str
    package: str
    extra: str
    environment: Mapping[str, str]
    options: Mapping[str, bool | str]
    chips: tuple[Chip, ...]


def _gpu(
    name: str, compute_capability: tuple[int, int], cores: int, fpus: int, shared: int, shared_optin: int, l2: int,
    clock_ghz: float, memory: int, memory_bandwidth: int,
) -> Chip:  # fmt: skip
    """The figures are those that XLA publishes for the SXM boards (openxla/xla, backends/gpu/target_config/specs)."""
    major, minor = compute_capability
    config = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared_optin}
  core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {clock_ghz} l2_cache_size: {l2}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {memory_bandwidth} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 }}
"""
    return Chip(name=name, axes=2, config=config)


# All-gathers run beside compute on v5e by default; reductions do with these. Compilers of other TPUs refuse them.
_V5E = {"xla_enable_async_all_reduce": True, "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True}

PLATFORMS: Mapping[Family, Platform] = MappingProxyType(
    {
        "gpu": Platform(
            backend="cuda",
            package="jax_cuda12_plugin",
            extra="cuda-aot",
            environment={"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
            options={},
            chips=(
                _gpu("a100", (8, 0), 108, 64, 167936, 166912, 41943040, 1.41, 85100068864, 2039040000000),
                _gpu("h100", (9, 0), 132, 128, 233472, 232448, 52428800, 1.98, 84942979072, 3352320000000),
                _gpu("h200", (9, 0), 132, 128, 233472, 232448, 52428800, 1.98, 151397597184, 4800000000000),
                _gpu("b200", (10, 0), 148, 128, 233472, 232448, 132644864, 1.965, 191514411008, 7672320000000),
            ),
        ),
        "tpu": Platform(
            backend="tpu",
            package="libtpu",
            extra="tpu-aot",
            environment={"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
            options={"xla_tpu_enable_async_all_to_all": True},
            chips=(
                Chip(name="v4", axes=3, devices=2, flops_per_cycle=131072),
                Chip(name="v5e", axes=2, flops_per_cycle=131072, options=_V5E),
                Chip(name="v5p", axes=3, flops_per_cycle=262144),
                Chip(name="v6e", axes=2, flops_per_cycle=524288),
                Chip(name="tpu7x", axes=3, devices=2, flops_per_cycle=524288),
            ),
        ),
        "cpu": Platform(
            backend="cpu", package="", extra="", environment={}, options={}, chips=(Chip(name="cpu", axes=1),)
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Chips in a shape, such as ``gpu:h100:1x8``.

    Attributes:
      shape: nodes and GPUs of each; or TPU chips along each axis; or the number of virtual CPU devices, empty for as
        many as a plan needs.
    """

    family: Family
    chip: Chip
    shape: tuple[int, ...]

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.family}:{self.chip.name}:{shape}" if self.family != "cpu" else f"cpu:{shape}".rstrip(":")

    @property
    def platform(self) -> Platform:
        return PLATFORMS[self.family]

    @property
    def options(self) -> dict[str, bool | str]:
        """Compiler options that a run should have too, or collectives are not hidden."""
        return {**self.platform.options, **self.chip.options}

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape) * self.chip.devices

    def for_devices(self, num_devices: int) -> Target:
        """Itself; of a ``cpu`` without a number, one with that many devices."""
        return self if self.shape else replace(self, shape=(num_devices,))

    @property
    def topology(self) -> Topology:
        """Its devices as data; no compiler is asked."""
        match self.family:
            case "gpu":
                return Topology.nested(("nvlink", self.shape[1]), ("network", self.shape[0]), kind=self.chip.name)
            case "tpu":
                return Topology.torus(*self.shape, kind=self.chip.name, cores=self.chip.devices)
            case "cpu":
                return Topology.nested(("memory", math.prod(self.shape)), ("network", 1), kind="cpu")


def parse_target(text: str) -> Target:
    """``FAMILY:CHIP:SHAPE``, such as ``gpu:h100:2x8`` or ``tpu:v6e:4x4``, as a Target.

    Raises:
      ConfigError: anything else; names the nearest family or chip, or the form of the shape.
    """
    parts = text.lower().split(":")
    if parts[0] == "cpu":
        parts = ["cpu", "cpu", *parts[1:]]
        if len(parts) == 2:
            return Target(family="cpu", chip=PLATFORMS["cpu"].chips[0], shape=())
    if len(parts) != 3:
        raise ConfigError(f"target {text!r} is not FAMILY:CHIP:SHAPE.", help=f"such as {EXAMPLES}.")
    name, chip_name, shape_text = parts
    family: Family | None = next((f for f in PLATFORMS if f == name), None)
    if family is None:
        raise ConfigError(f"target {text!r}: there is no family {name!r}.", help=suggest(name, PLATFORMS))
    chips = {chip.name: chip for chip in PLATFORMS[family].chips}
    if chip_name not in chips:
        raise ConfigError(f"target {text!r}: no {family} chip is called {chip_name!r}.", help=suggest(chip_name, chips))
    return Target(family=family, chip=chips[chip_name], shape=_shape(text, family, chips[chip_name], shape_text))


def _shape(text: str, family: Family, chip: Chip, shape_text: str) -> tuple[int, ...]:
    sizes = shape_text.split("x")
    if not all(s.isascii() and s.isdigit() and int(s) for s in sizes) or len(sizes) != chip.axes:
        each_way = "x".join("2" * chip.axes) + ", chips each way"
        example = {"gpu": "1x8, nodes x GPUs of a node", "tpu": each_way, "cpu": "8, virtual devices"}[family]
        count = f"{chip.axes} numbers" if chip.axes > 1 else "a number"
        raise ConfigError(
            f"target {text!r}: {shape_text!r} is not the shape of {chip.name}.",
            help=f"give {count} from 1, such as {example}.",
        )
    shape = tuple(map(int, sizes))
    if family == "gpu" and shape[-1] > GPUS_PER_NODE:
        nodes = -(-math.prod(shape) // GPUS_PER_NODE)
        raise ConfigError(
            f"target {text!r}: a node has up to {GPUS_PER_NODE} GPUs.", help=f"{nodes}x{GPUS_PER_NODE} is that many."
        )
    return shape
