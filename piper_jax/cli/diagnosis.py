"""What ``piper doctor`` finds out about this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

TESTED = {(3, 11): {"jax": "0.10.2", "flax": "0.12.8"}, (3, 12): {"jax": "0.12", "flax": "0.12.12"}}
OPTIONAL = {
    "libtpu": "compiling for TPU without one",
    "jax_cuda12_plugin": "compiling for NVIDIA GPUs without one",
    "matplotlib": "pictures (.svg .png .pdf)",
}


def diagnose() -> tuple[list[str], bool]:
    """Lines to print, and whether everything needed is there."""
    python = sys.version_info[:2]
    lines, healthy = [f"python      {sys.version.split()[0]}"], True
    tested = TESTED[max(pair for pair in TESTED if pair <= python)] if python >= (3, 11) else {}
    for name in ("jax", "jaxlib", "flax", "optax"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name:11} MISSING: pip install {name}")
            healthy = False
            continue
        expected = tested.get(name)
        untested = expected is not None and not version.startswith(expected)
        lines.append(f"{name:11} {version}" + (f"   (tested with {expected})" if untested else ""))
    for name, use in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            lines.append(f"{name:11} not installed; needed for {use}")
    if healthy:
        lines += _devices()
    return lines, healthy


def _devices() -> list[str]:
    import jax

    from piper_jax.topology import topology_of

    devices = jax.devices()
    kinds = sorted({f"{d.platform} {d.device_kind}" for d in devices})
    lines = [f"devices     {len(devices)} ({', '.join(kinds)}), process {jax.process_index()} of {jax.process_count()}"]
    topology = topology_of(devices)
    if not topology.is_flat:
        lines.append(f"topology    {topology}")
    if devices[0].platform == "cpu" and len(devices) == 1:
        lines.append(
            "            XLA_FLAGS=--xla_force_host_platform_device_count=8 makes one CPU look like eight devices"
        )
    return lines
