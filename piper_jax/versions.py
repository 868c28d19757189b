"""Which versions of JAX and Flax belong together. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from piper_jax.errors import ConfigError

TESTED: Mapping[tuple[int, int], Mapping[str, str]] = {
    (3, 11): {"jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8"},
    (3, 12): {"jax": "0.12", "jaxlib": "0.12", "flax": "0.12.12"},
}
"""Python from this version on -> the versions that the tests run with; ``0.12`` stands for every 0.12.x."""

PACKAGES = ("jax", "jaxlib", "flax", "optax")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFault:
    """What is wrong with the installed versions.

    Attributes:
      is_broken: they cannot work together; otherwise nobody has tried.
      what, help: a sentence each; the second has the command.
    """

    is_broken: bool
    what: str
    help: str


def installed_versions(names: Iterable[str] = (*PACKAGES, *PLUGINS)) -> dict[str, str]:
    """Those of the named packages, by default JAX, Flax and what belongs to them; without what is not installed."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def version_faults(
    installed: Mapping[str, str], python: tuple[int, int] = sys.version_info[:2]
) -> tuple[VersionFault, ...]:
    """Missing packages, a mixed pair of jax and jaxlib, and versions that are not the tested ones; the worst first."""
    tested = TESTED[max(known for known in TESTED if known <= max(python, min(TESTED)))]
    command = "pip install " + " ".join(f"'{name}=={_pattern(version)}'" for name, version in tested.items())
    faults: list[VersionFault] = []
    missing = [name for name in PACKAGES if name not in installed]
    if missing:
        faults.append(VersionFault(is_broken=True, what=f"{', '.join(missing)} missing.", help=command))
    jax = installed.get("jax")
    for name in ("jaxlib", *PLUGINS):
        version = installed.get(name)
        if jax is not None and version is not None and not _fit(jax, version):
            faults.append(
                VersionFault(is_broken=True, what=f"jax {jax} and {name} {version} are no pair.", help=command)
            )
    untested = [
        f"{name} {installed[name]} (tested with {_pattern(version)})"
        for name, version in tested.items()
        if name in installed and not f"{installed[name]}.".startswith(f"{version}.")
    ]
    if untested:
        faults.append(VersionFault(is_broken=False, what=f"not tested: {', '.join(untested)}.", help=command))
    return tuple(faults)


def require_versions() -> tuple[VersionFault, ...]:
    """To be called before JAX is imported.

    Returns:
      What is merely untested.

    Raises:
      ConfigError: packages are missing, or cannot work together.
    """
    faults = version_faults(installed_versions())
    for fault in faults:
        if fault.is_broken:
            raise ConfigError(fault.what, help=fault.help)
    return faults


def _fit(jax: str, other: str) -> bool:
    """A jaxlib or plugin of the same minor release, not newer: jax refuses a newer one, or fails in its midst."""
    left, right = _numbers(jax), _numbers(other)
    return left[:2] == right[:2] and right <= left


def _numbers(version: str) -> Sequence[int]:
    """``0.12.0.dev1`` -> [0, 12, 0]."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return numbers


def _pattern(version: str) -> str:
    return version if version.count(".") > 1 else f"{version}.*"
