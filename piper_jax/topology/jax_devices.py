"""JAX devices as data. Only their attributes are read, so JAX is not imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piper_jax.topology.base import WHOLE_RING, PhysicalDevice, Topology

# Parts of ``device.device_kind``, the first that fits.
KINDS = (
    ("A100", "a100"), ("H100", "h100"), ("H200", "h200"), ("B200", "b200"),
    ("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5e", "v5e"), ("TPU v5", "v5p"), ("TPU v6", "v6e"),
    ("TPU7x", "tpu7x"),
)  # fmt: skip
FAMILIES = {"gpu": ("nvlink", "network"), "tpu": ("ici", "dcn")}


def topology_of(devices: Sequence[Any], kind: str | None = None) -> Topology:
    """The topology of JAX devices, in their order.

    GPUs of one ``slice_index`` (one host, or several that share NVLink), or of one process where it is not known, are
    one block; TPUs of one slice have coordinates; virtual CPU devices of one process are alike.

    Args:
      kind: their profile or chip, where ``device_kind`` does not tell.
    """
    platform = getattr(devices[0], "platform", "cpu") if devices else "cpu"
    family = "gpu" if platform in ("gpu", "cuda", "rocm") else platform
    is_torus = family == "tpu" and all(getattr(d, "coords", None) for d in devices)
    text = getattr(devices[0], "device_kind", "") if devices else ""
    name = kind or next((name for part, name in KINDS if part in text), family)
    axes = 2 if name in WHOLE_RING else 3
    origin = [min(along) for along in zip(*(d.coords for d in devices), strict=True)] if is_torus else []
    found = tuple(
        PhysicalDevice(
            blocks=(_block(d, family),), process=d.process_index,
            coords=tuple(c - o for c, o in zip(d.coords[:axes], origin, strict=False)) if is_torus else (),
            core=getattr(d, "core_on_chip", 0) if is_torus else 0,
        )
        for d in devices
    )  # fmt: skip
    levels = FAMILIES.get(family, ("memory", "network"))
    sides = _sides([d.coords for d in found]) if is_torus else ()
    host = _sides([d.coords for d in found if d.process == found[0].process]) if is_torus else ()
    return Topology(kind=name, levels=levels, devices=found, sides=sides, host=host)


def _block(device: Any, family: str) -> int:
    index = getattr(device, "slice_index", None)
    if family not in FAMILIES or (index is None and family == "gpu"):
        return device.process_index
    return index or 0


def _sides(coords: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(max(along) - min(along) + 1 for along in zip(*coords, strict=True))
