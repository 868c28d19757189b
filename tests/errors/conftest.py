"""What is given to the compiler while a test runs."""

from __future__ import annotations

from typing import Any

import pytest

pytest.register_assert_rewrite("expected")


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels of the programs that were given to the compiler."""
    from piper_jax.lowering.programs import Compiler

    seen: list[str] = []
    compile_ = Compiler.compile

    def counted(self: Compiler, *args: Any, label: str, **options: Any) -> Any:
        seen.append(label)
        return compile_(self, *args, label=label, **options)

    monkeypatch.setattr(Compiler, "compile", counted)
    return seen
