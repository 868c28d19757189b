"""The directives that made a plan, as data: printed, saved and replayed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import And, Filter, Not, Or, Where, selects
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import DeviceGroup
from piper_jax.ir.selection import paths_of

PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = (PACKAGE / "directives", PACKAGE.parent / "directives")
"""Where the strategies that come with piper lie: inside the package when installed, beside it in a source tree."""
MAX_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """One primitive directive as it was called.

    Attributes:
      name: ``"place"``.  arguments: by keyword, all plain data.
      line: ``my_schedule.py:30``, where it was called; for what a strategy that comes with piper called, where that
        was named.
    """

    name: str
    arguments: tuple[tuple[str, object], ...]
    line: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        """As it is shown, and where it was written."""
        return at_line(str(self), self.line)

    def __str__(self) -> str:
        shown = (_argument_text(name, value) for name, value in self.arguments)
        return f"{self.name}({', '.join(shown)})"


def user_line() -> str:
    """``file.py:line`` of the innermost caller outside of this package; "" if that is a strategy that comes with it.

    Frames of the interpreter's own, such as that of ``python -m``, are nobody's lines.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_shipped(file) or file == "<frozen runpy>":
            return ""
        path = Path(file)
        if PACKAGE not in path.parents and file != "<string>":
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_shipped(file: str) -> bool:
    """Whether a strategy's file came with piper, so that its lines say nothing to a user."""
    return any(folder in Path(file).parents for folder in SHIPPED)


def at_line(text: str, line: str) -> str:
    """``text at file.py:30``, or ``text`` alone where no line is known."""
    return f"{text} at {line}" if line else text


def failing_line(error: BaseException, file: str) -> str:
    """``file.py:line`` of the innermost call of ``error`` in ``file`` or beside it; "" where it is in neither."""
    folder = Path(file).parent
    calls = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        calls.append((Path(error.filename), error.lineno))
    inside = [f"{path.name}:{line}" for path, line in calls if path.parent == folder]
    return inside[-1] if inside else ""


def first_line(error: BaseException) -> str:
    """``IndexError: list index out of range``: kind and first line of what an exception says."""
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def earlier(history: Sequence[Applied], dag: Dag, name: str, node: NodeId) -> Applied | None:
    """The latest directive called ``name`` that selected ``node``."""
    for record in reversed(history):
        if record.name != name:
            continue
        if name == "split" or any(selects(f, node, lambda n: paths_of(dag, n)) for f in _filters(record)):
            return record
    return None


def _filters(record: Applied) -> Sequence[Filter]:
    found: list[Filter] = []
    pending = [value for _, value in record.arguments]
    while pending:
        value = pending.pop()
        if isinstance(value, Where | Not | And | Or):
            found.append(value)
        elif isinstance(value, tuple | list):
            pending.extend(value)
    return found


def _argument_text(name: str, value: object) -> str:
    text = _value_text(value)
    return text if name in ("filter", "slots") else f"{name}={text}"


def _value_text(value: object) -> str:
    match value:
        case Where() | Not() | And() | Or():
            return str(value)
        case DeviceGroup(name=name):
            return name
        case list() | tuple() if value and isinstance(value[0], Where | Not | And | Or | tuple | list):
            shown = [_value_text(item) for item in value[:MAX_SHOWN]]
            more = [f"... {len(value) - MAX_SHOWN} more"] if len(value) > MAX_SHOWN else []
            return "[" + ", ".join([*shown, *more]) + "]"
        case _:
            return repr(value)
