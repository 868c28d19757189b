"""Error families. Every user-facing fault is one of these, at most 12 lines, naming what, where and the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_LINES = 12


class PiperError(Exception):
    """Base of all errors raised for a user's mistake or a fault at run time.

    Args:
      what: one line that names the directive or object, the place and the fault.
      detail: further lines (indented in the message), truncated so that the whole stays within 12 lines.
      help: the change that would make it work.
      **data: facts for programs that catch the error; they become attributes in ``error.data``.
    """

    def __init__(self, what: str, *, detail: Iterable[str] = (), help: str = "", **data: object):
        self.what, self.detail, self.help, self.data = what, tuple(detail), help, data
        super().__init__(self._message())

    def _message(self) -> str:
        head = self.what.splitlines() or [""]
        tail = [f"help: {self.help}"] if self.help else []
        room = MAX_LINES - len(head) - len(tail)
        body = [line for text in self.detail for line in text.splitlines()]
        if len(body) > room:
            body = [*body[: max(room - 1, 0)], f"... and {counted(len(body) - max(room - 1, 0), 'more line')}"]
        return "\n".join([*head[:MAX_LINES], *("    " + line for line in body), *tail])


class AnnotationError(PiperError):
    """An annotation on the model is wrong or contradicts another one."""


class TraceError(PiperError):
    """The loss function, parameters, batch or optimizer cannot be traced as asked."""


class FilterError(PiperError):
    """A filter names something that does not exist, or matches nothing."""


class DirectiveError(PiperError):
    """A directive cannot be applied to this plan."""


class PlanError(PiperError):
    """A plan breaks a rule of the checker, or cannot be loaded or bound."""


class ProcessFault(PiperError):
    """Another process is lost, stuck, or not like this one (exit code 5)."""


class ConfigError(PiperError):
    """A configuration file or command line is wrong (exit code 2)."""


class DataError(PiperError):
    """A record or file of the data cannot be read, or is not what it was."""


class RuntimeFault(PiperError):
    """A fault while a step runs: wrong arguments, too few devices, a stuck transfer."""


class CheckpointError(PiperError):
    """A checkpoint cannot be saved, is damaged, or is of another model (exit code 3)."""


class NonFiniteError(PiperError):
    """A loss or a gradient is NaN or infinite (exit code 4)."""


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Around what writes ``path``: the file system's refusal becomes a :class:`ConfigError`."""
    try:
        yield
    except OSError as error:
        folder = Path(path).parent
        fix = "give the path of a file that may be written." if folder.is_dir() else f"make the folder {folder} first."
        raise ConfigError(f"cannot write {path}: {error.strerror or error}.", help=fix) from None


def counted(count: int, noun: str) -> str:
    """``"1 stage"``, ``"2 stages"``, ``"2 microbatches"``, ``"2 leaves"``."""
    plural = re.sub("leaf$", "leav", noun) + ("es" if noun.endswith(("ch", "leaf", "ss")) else "s")
    return f"{count} {noun if count == 1 else plural}"


def nearest(word: str, paths: Iterable[str]) -> str:
    """``"such as layers.1.kernel, layers.0.kernel."``: the three paths nearest to a word, or the first three."""
    known = list(dict.fromkeys(paths))
    return f"such as {', '.join(difflib.get_close_matches(word, known, n=3, cutoff=0.3) or known[:3])}."


def suggest(word: str, known: Iterable[str]) -> str:
    """``"did you mean '1F1B'?"`` for the nearest known word, or the few that end otherwise, else all known words."""
    known = sorted(set(known))
    lower = {k.lower(): k for k in known}
    word = word.lower()
    near = difflib.get_close_matches(word, lower, n=4, cutoff=0.5)
    if not near:
        return "known: " + ", ".join(known)
    alike = [k for k in sorted(near) if k[:-1] == word[:-1]] if word not in lower else []
    *others, last = (repr(lower[k]) for k in (alike if 1 < len(alike) < 4 else near[:1]))
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"
