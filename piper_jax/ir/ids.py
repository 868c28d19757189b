"""Names of things in a plan: passes, coordinates and structured node ids."""

from __future__ import annotations

from typing import Literal, NamedTuple

Pass = Literal["F", "B", "BI", "BW", "U"]
PASSES: tuple[Pass, ...] = ("F", "B", "BI", "BW", "U")
COORDINATES = ("PASS", "PP", "EP", "MB")


class NodeId(NamedTuple):
    """Identity of a node: an operation and its coordinates. A coordinate that does not apply is None.

    ``op`` names an entry of ``Dag.ops`` for compute nodes; for communication and updates it is a name derived from
    the value or state that is moved, such as ``"send layers.0>g1"``. Prints as ``F[PP=1,MB=0] layers.4``.
    """

    op: str
    PASS: str | None = None
    PP: int | None = None
    EP: int | None = None
    MB: int | None = None

    def __str__(self) -> str:
        coordinates = ",".join(
            f"{name}={value}"
            for name, value in (("PP", self.PP), ("EP", self.EP), ("MB", self.MB))
            if value is not None
        )
        return f"{self.PASS or ''}[{coordinates}] {self.op}" if coordinates else f"{self.PASS or ''} {self.op}".strip()
