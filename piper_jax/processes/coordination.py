"""What processes tell each other outside their programs, through the key-value store of process 0."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from piper_jax.errors import ProcessFault, counted

_PREFIX = "piper"


@dataclass(slots=True, kw_only=True)
class Coordination:
    """This process among the others.

    Attributes:
      process, count: its number, and how many there are.
    """

    process: int
    count: int
    _client: Any
    _met: int = 0

    def tell(self, topic: str, value: str) -> None:
        """Leaves a value under a topic, in place of this process's earlier one."""
        self._client.key_value_set(f"{_PREFIX}/{topic}/{self.process}", value, allow_overwrite=True)

    def told(self, topic: str) -> dict[int, str]:
        """What each process has left under a topic."""
        found = self._client.key_value_dir_get(f"{_PREFIX}/{topic}")
        return {int(key.rsplit("/", 1)[1]): value for key, value in found}

    def meet(self, name: str, seconds: float) -> None:
        """Waits until all processes are here. All must meet in the same order.

        Args:
          name: what messages call it, such as ``"compiled"``.

        Raises:
          ProcessFault: some did not come in time; names them.
        """
        self._met += 1
        topic = f"meet {self._met} {name}"
        self.tell(topic, "here")
        try:
            self._client.wait_at_barrier(f"{_PREFIX} {topic}", round(seconds * 1000))
        except Exception as error:
            raise self._not_met(name, topic, seconds, error) from None

    def _not_met(self, name: str, topic: str, seconds: float, error: Exception) -> ProcessFault:
        try:
            missing = sorted(set(range(self.count)) - set(self.told(topic)))
        except Exception:
            missing = [0]
        who = f"{'process' if len(missing) == 1 else 'processes'} {', '.join(map(str, missing))}"
        late = f"{who} did not come to the barrier {name!r} within {seconds:g} s"
        late = late if missing else f"barrier {name!r} failed"
        return ProcessFault(
            f"process {self.process}: {late}.", detail=[] if missing else str(error).splitlines()[:3],
            help="look at its output: it has failed, is stuck, or needs a longer limit.",
        )  # fmt: skip

    def exchange(self, topic: str, value: str, seconds: float) -> dict[int, str]:
        """What all processes leave under a topic, once all have.

        Raises:
          ProcessFault: as :meth:`meet`.
        """
        self.tell(topic, value)
        self.meet(topic, seconds)
        found = self.told(topic)
        self.meet(f"{topic} read", seconds)  # process 0 may end after this, and the store with it
        return found

    def agree(self, facts: Mapping[str, Any], seconds: float) -> None:
        """Checks that all processes have the same facts, such as versions.

        Raises:
          ProcessFault: names the facts that differ, and the processes.
        """
        found = self.exchange("facts", json.dumps(dict(facts), sort_keys=True), seconds)
        told = {process: json.loads(text) for process, text in sorted(found.items())}
        differing = [
            f"{name}: " + ", ".join(f"{found.get(name)} in process {process}" for process, found in told.items())
            for name in facts
            if len({json.dumps(found.get(name)) for found in told.values()}) > 1
        ]
        if differing:
            raise ProcessFault(
                f"the {counted(self.count, 'process')} differ in {counted(len(differing), 'thing')}.",
                detail=differing,
                help="give all the same installation and the same configuration.",
            )

    def close(self) -> None:
        """Leaves the others, once all of them do."""
        import jax

        jax.distributed.shutdown()


_JOINED: list[Coordination] = []


def coordination() -> Coordination | None:
    """This process among the others; None where it is alone. Imports no JAX where nothing has."""
    if not _JOINED and "jax" in sys.modules:
        from piper_jax import _jax_compat

        found = _jax_compat.coordination_client()
        if found is not None:
            _JOINED.append(Coordination(process=found[0], count=found[1], _client=found[2]))
    return _JOINED[0] if _JOINED else None
