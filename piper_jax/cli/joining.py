"""A command that several processes run together: each joins the others before JAX has devices, one of them prints."""

from __future__ import annotations

import hashlib
import platform

from rich.console import Console

from piper_jax.cli.devices import prepare_devices
from piper_jax.config import Config, config_text
from piper_jax.processes.requested import requested
from piper_jax.versions import PACKAGES, installed_versions

_PACKAGES = ("piper-jax", *PACKAGES)


def joined(config: Config) -> Console:
    """Prepares this process's devices and, where the environment asks for several processes, joins the others.

    Returns:
      The console to print to; quiet in all processes but the first.

    Raises:
      ProcessFault: the others did not come, or differ in versions or configuration.
    """
    asked = None if config.processes.join == "never" else requested()
    prepare_devices(config.devices, 1 if asked is None else asked.count)
    if asked is None:
        return Console()
    from piper_jax.processes.coordination import coordination
    from piper_jax.processes.joining import join

    join(asked, config.processes.start_limit)
    found = coordination()
    if found is None:
        return Console()
    found.agree(_facts(config), config.processes.start_limit)
    return Console(quiet=found.process > 0)


def _facts(config: Config) -> dict[str, str]:
    """What must be the same in all processes."""
    versions = dict.fromkeys(_PACKAGES, "none") | installed_versions(_PACKAGES)
    digest = hashlib.sha256(config_text(config).encode()).hexdigest()[:12]
    return {"Python": platform.python_version(), **versions, "configuration": digest}
