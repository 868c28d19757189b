"""Records that cannot be read: an error, or left out up to a bound, and reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from piper_jax.errors import DataError, counted

T = TypeVar("T")
MAX_SHOWN = 5


@dataclass(slots=True, kw_only=True)
class Skipped:
    """What was left out so far.

    Attributes:
      limit: how many may be; 0 means that the first is an error.
      reasons: place and fault of each; one that comes again in the next epoch is no new one.
    """

    limit: int = 0
    reasons: dict[str, None] = field(default_factory=dict)

    def unless_corrupt(self, read: Callable[[], T]) -> T | None:
        """What ``read`` gives; None where it finds a corrupt record that may be left out."""
        try:
            return read()
        except DataError as error:
            self.take(error)
            return None

    def take(self, error: DataError) -> None:
        """Leaves one more out.

        Raises:
          DataError: none may be, or more were than may.
        """
        if not self.limit:
            raise error
        self.reasons[error.what] = None
        if len(self.reasons) > self.limit:
            raise DataError(
                f"data: {counted(len(self.reasons), 'corrupt record')}, and data.max_corrupt = {self.limit}.",
                detail=self.reasons,
                help="mend the files, or raise data.max_corrupt.",
            )

    def __str__(self) -> str:
        if not self.reasons:
            return ""
        shown, more = list(self.reasons)[:MAX_SHOWN], len(self.reasons) - MAX_SHOWN
        lines = [*shown, *([f"... and {more} more"] if more > 0 else [])]
        return "\n    ".join([f"{counted(len(self.reasons), 'corrupt record')} left out", *lines])
