"""Notebooks run from start to end, and each is the same as its script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_process import ROOT, environment

SCRIPTS = sorted((ROOT / "notebooks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.timeout(120)
def test_runs(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_is_the_same_as_its_notebook(script: Path) -> None:
    cells = json.loads(script.with_suffix(".ipynb").read_text())["cells"]
    assert len(cells) > 5
    text = script.read_text()
    position = 0
    for cell in cells:
        for line in "".join(cell["source"]).splitlines():
            found = text.find(line, position)
            assert found >= 0, f"{script.name} lacks, in this order: {line!r}"
            position = found + len(line)
    code = [line for line in text.splitlines() if line and not line.startswith("#")]
    inside = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert [line for line in code if line not in inside.splitlines()] == []
