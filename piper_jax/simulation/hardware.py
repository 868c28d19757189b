"""Hardware profiles: peak rates of one device, and the bandwidth and latency of each level of its network.

All figures are peaks, so a roofline time is a lower bound. Bandwidths are bytes per second and device in ONE direction.

Sources:
  NVIDIA A100, H100 and H200 datasheets (SXM): dense tensor-core rates, HBM, NVLink (published both ways, halved here).
  NICs are those of DGX A100 (HDR, 200 Gbit/s per GPU) and DGX H100/H200 (NDR, 400 Gbit/s per GPU).
  GPU latencies: NCCL, src/graph/tuning.cc, ring with the simple protocol (NVLink 3.4 us a step, network 14 us).
  p4d: eight A100 of 40 GB (1,555 GB/s) on NVSwitch and 400 Gbit/s of EFA for all of them, an eighth for each
  (aws.amazon.com/ec2/instance-types/p4); 75 us is what aws-ofi-nccl (src/platform-aws.c) tells NCCL of its network.
  TPU chips: cloud.google.com/tpu/docs/v5e, /v5p, /v6e.  ICI per link, DCN per chip and the 1 us hop: "How to Scale Your
  Model", jax-ml.github.io/scaling-book/tpus (a ring over one torus axis uses its links in both directions).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real

from piper_jax.arguments import require_fields
from piper_jax.errors import ConfigError, suggest


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the network: what any two devices inside the same block of ``num_devices`` consecutive ids share.

    Attributes:
      name: such as ``"nvlink"`` or ``"network"``.
      num_devices: size of a block, or None for the whole system.
      bandwidth: bytes per second that one device sends to one other (and, at once, receives).
      ring_bandwidth: bytes per second that one device sends in a ring collective (both directions of a torus axis).
      latency_seconds: of one step between two devices.
    """

    name: str
    num_devices: int | None
    bandwidth: float
    ring_bandwidth: float
    latency_seconds: float

    def __post_init__(self) -> None:
        owner = f"Level {self.name!r}"
        require_fields(self, ConfigError, f"{owner}: ")
        require_numbers(owner, above=0, bandwidth=self.bandwidth, ring_bandwidth=self.ring_bandwidth)
        require_numbers(owner, latency_seconds=self.latency_seconds)
        if self.num_devices is not None:
            require_numbers(owner, above=0, num_devices=self.num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of device and the network between many of them.

    Attributes:
      flops_per_second: peak by dtype; dtypes that are not listed run at the rate of ``float32``.
      memory_bandwidth: bytes per second.  memory_bytes: capacity of one device.
      levels: from the fastest and smallest to the slowest, whose ``num_devices`` is None.
      launch_seconds: least time of one program.
      concurrency: how many devices compute at full speed at once, or None if each has its own processor. Virtual CPU
        devices share one pool of cores, so theirs is 1: k busy devices each run at 1/k of the speed.
    """

    name: str
    flops_per_second: tuple[tuple[str, float], ...]
    memory_bandwidth: float
    memory_bytes: int
    levels: tuple[Level, ...]
    launch_seconds: float = 0.0
    concurrency: float | None = None

    def __post_init__(self) -> None:
        owner = f"Hardware {self.name!r}"
        require_fields(self, ConfigError, f"{owner}: ")
        if not self.levels:
            raise ConfigError(f"{owner}: levels is empty.", help="give one Level at least, with num_devices=None.")
        sizes = [level.num_devices for level in self.levels]
        inner = [size for size in sizes[:-1] if size is not None]
        if sizes[-1] is not None or len(inner) < len(sizes) - 1 or any(b % a or a == b for a, b in pairwise(inner)):
            raise ConfigError(
                f"{owner}: its levels are of {', '.join(map(str, sizes))} devices.",
                help="from the smallest blocks to larger ones that hold whole blocks, the last with num_devices=None.",
            )
        if "float32" not in dict(self.flops_per_second):
            raise ConfigError(
                f"{owner}: flops_per_second has no float32.",
                help="list it; the rate of dtypes that are not listed.",
            )
        for dtype, rate in self.flops_per_second:
            require_numbers(owner, above=0, **{f"flops_per_second of {dtype}": rate})
        require_numbers(owner, above=0, memory_bandwidth=self.memory_bandwidth, memory_bytes=self.memory_bytes)
        require_numbers(owner, launch_seconds=self.launch_seconds)
        if self.concurrency is not None:
            require_numbers(owner, above=0, concurrency=self.concurrency)

    def peak(self, dtype: str) -> float:
        """Peak floating-point operations per second for ``dtype``."""
        rates = dict(self.flops_per_second)
        return rates.get(dtype, rates["float32"])


def is_finite(value: object) -> bool:
    """Whether it is a number, neither infinite nor NaN."""
    return value is not True and value is not False and isinstance(value, Real) and math.isfinite(value)


def require_numbers(owner: str, *, above: float | None = None, **values: float) -> None:
    """Refuses what is not a finite number from 0; where ``above`` is given, above it.

    Raises:
      ConfigError: names the owner and the value.
    """
    legal = "a finite number from 0" if above is None else f"a finite number above {above:g}"
    for name, value in values.items():
        if not is_finite(value) or not (value >= 0 if above is None else value > above):
            raise ConfigError(f"{owner}: {name}={value!r}.", help=f"give {legal}.")


def _gpu(
    name: str, bf16: float, tf32: float, f64: float, hbm: float, gigabytes: int, nvlink: float, nic: float,
    nic_latency: float = 14e-6,
) -> Hardware:  # fmt: skip
    """float32 runs as TF32, JAX's default matmul precision on these GPUs."""
    return Hardware(
        name=name,
        flops_per_second=(("bfloat16", bf16), ("float16", bf16), ("float32", tf32), ("float64", f64)),
        memory_bandwidth=hbm,
        memory_bytes=gigabytes * 10**9,
        levels=(
            Level(name="nvlink", num_devices=8, bandwidth=nvlink, ring_bandwidth=nvlink, latency_seconds=3.4e-6),
            Level(name="network", num_devices=None, bandwidth=nic, ring_bandwidth=nic, latency_seconds=nic_latency),
        ),
        launch_seconds=5e-6,
    )


def _tpu(name: str, bf16: float, hbm: float, gigabytes: int, link: float, dcn: float, pod: int) -> Hardware:
    """float32 matmuls run as one bf16 pass, JAX's default precision on TPU."""
    return Hardware(
        name=name,
        flops_per_second=(("bfloat16", bf16), ("float32", bf16)),
        memory_bandwidth=hbm,
        memory_bytes=gigabytes * 10**9,
        levels=(
            Level(name="ici", num_devices=pod, bandwidth=link, ring_bandwidth=2 * link, latency_seconds=1e-6),
            Level(name="dcn", num_devices=None, bandwidth=dcn, ring_bandwidth=dcn, latency_seconds=20e-6),
        ),
        launch_seconds=5e-6,
    )


# Two cores of an AMD EPYC server under XLA, the best of several hundred calls: a matmul of 1024 x 1024, reading and
# writing 256 MB, an empty jitted call, and device_put of 64 B and of 4 MB between two virtual devices.
_CPU = Hardware(
    name="cpu",
    flops_per_second=(("float32", 1.1e11), ("float64", 1.1e11), ("bfloat16", 1.2e11)),
    memory_bandwidth=7e9,
    memory_bytes=8 * 10**9,
    levels=(Level(name="memory", num_devices=None, bandwidth=1.2e10, ring_bandwidth=1.2e10, latency_seconds=60e-6),),
    launch_seconds=5e-6,
    concurrency=1.0,
)

HARDWARE: dict[str, Hardware] = {
    "a100": _gpu("a100", 312e12, 156e12, 19.5e12, 2.039e12, 80, 300e9, 25e9),
    "p4d": _gpu("p4d", 312e12, 156e12, 19.5e12, 1.555e12, 40, 300e9, 6.25e9, nic_latency=75e-6),
    "h100": _gpu("h100", 989e12, 495e12, 67e12, 3.35e12, 80, 450e9, 50e9),
    "h200": _gpu("h200", 989e12, 495e12, 67e12, 4.8e12, 141, 450e9, 50e9),
    "v5e": _tpu("v5e", 197e12, 0.819e12, 16, 45e9, 3.125e9, 256),
    "v5p": _tpu("v5p", 459e12, 2.765e12, 95, 90e9, 6.25e9, 8960),
    "v6e": _tpu("v6e", 918e12, 1.638e12, 32, 90e9, 12.5e9, 256),
    "cpu": _CPU,
}


def hardware_profile(hardware: str | Hardware) -> Hardware:
    """The profile of that name (any case), or the given profile itself.

    Raises:
      ConfigError: the name is unknown; names the nearest known one.
    """
    if isinstance(hardware, Hardware):
        return hardware
    found = HARDWARE.get(hardware.lower())
    if found is None:
        raise ConfigError(
            f"hardware {hardware!r} has no profile.", help=suggest(hardware.lower(), HARDWARE), name=hardware
        )
    return found
