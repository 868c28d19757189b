"""What the README shows, runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from piper_jax.cli.main import app
from piper_jax.config import load_config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_LINES = 25

pytestmark = pytest.mark.needs_jax


def _example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return code


def test_example_is_short():
    lines = [line for line in _example().splitlines() if line.strip()]
    assert len(lines) <= MAX_LINES


@pytest.mark.timeout(180)
def test_example_runs(tmp_path: Path):
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{_example()}"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "stages=4 microbatches=8 groups=4 devices=8" in done.stdout
    assert (tmp_path / "plan.html").stat().st_size > 1000


@pytest.mark.parametrize("command", re.findall(r"^piper (\w+ +configs/.*?)(?: {2,}#.*)?$", README, re.MULTILINE))
def test_commands_are_of_configurations_that_load(command: str):
    context = get_command(app).make_context("piper", shlex.split(command))
    name, parse, arguments = get_command(app).resolve_command(context, shlex.split(command))
    given = parse.make_context(name, arguments).params
    load_config(ROOT / (given.get("config") or given["source"]), given["overrides"] or ())


@pytest.mark.parametrize("link", re.findall(r"\]\((?!https?://)([^)#]+)\)", README))
def test_links_lead_somewhere(link: str):
    assert (ROOT / link).exists()
