"""Draws the pictures of the documentation: ``python docs/draw_pictures.py`` from the root of the repository.

The plan is that of ``configs/gpt_stdlib.yaml``; its costs are units (F=1, B=2), so the picture is the same everywhere.
"""

from __future__ import annotations

from pathlib import Path

import piper_jax as piper
from piper_jax.config import load_config
from piper_jax.train.job import Job

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Writes ``docs/images/1f1b.svg``."""
    job = Job.of(load_config(ROOT / "configs" / "gpt_stdlib.yaml"))
    report = piper.simulate(job.plan(), title="1F1B: 4 stages, 8 microbatches")
    piper.draw(report, ROOT / "docs" / "images" / "1f1b.svg")


if __name__ == "__main__":
    main()
