"""Functions that fail, each with the whole text that a user then reads."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import piper_jax as piper
from piper_jax.errors import MAX_LINES

LISTED = r"(known:|^    \w+_\w+:) .*"
"""What is known, and options with their meanings: the strategies that come with piper may say more one day."""

Function = Callable[[], object]


class Expected:
    """A decorator of functions: the family of the error that they raise, and its text, dedented.

    Line numbers are written as LINE, the file that holds the functions as FILE.py, and what LISTED matches as dots.
    """

    def __init__(self, file: str):
        self.file = Path(file).name
        self.cases: dict[str, tuple[Function, type[piper.PiperError], str]] = {}

    def __call__(self, error: type[piper.PiperError], message: str) -> Callable[[Function], Function]:
        def register(function: Function) -> Function:
            self.cases[function.__name__] = (function, error, textwrap.dedent(message).strip("\n"))
            return function

        return register

    def check(self, name: str) -> None:
        """Runs one function and compares."""
        function, error, message = self.cases[name]
        with pytest.raises(piper.PiperError) as caught:
            function()
        text = str(caught.value)
        assert len(text.splitlines()) <= MAX_LINES
        assert type(caught.value) is error
        text = re.sub(r"(?<!model)\.py:\d+", ".py:LINE", text.replace(self.file, "FILE.py"))
        assert re.sub(LISTED, r"\1 ...", text, flags=re.MULTILINE) == message
