"""Draws the pictures of the documentation: ``python docs/draw_pictures.py`` from the root of the repository.

The plans are those of ``configs/gpt_stdlib.yaml``; costs are units (F=1, B=2), so the pictures are the same everywhere.
"""

from __future__ import annotations

from pathlib import Path

import piper_jax as piper
from piper_jax import where
from piper_jax.config import load_config
from piper_jax.planning import Plan
from piper_jax.train.job import Job

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
TIMELINES = {
    "1f1b.svg": ("1F1B: 4 stages, 8 microbatches", ()),
    "dualpipev.svg": ("DualPipeV: 8 stages on 4 groups", ("strategy.directives=DualPipeV",)),
    "zbh1_512.svg": (
        "ZBH1: 512 microbatches",
        ("strategy.directives=ZBH1", "strategy.num_microbatches=512", "train.batch_size=1024"),
    ),
}


def main() -> None:
    """Writes the files in ``docs/images``."""
    for name, (title, overrides) in TIMELINES.items():
        piper.draw(piper.simulate(planned(*overrides), title=title), IMAGES / name)
    piper.draw(planned("strategy.zero_stage=3"), IMAGES / "graph.svg", select=where(MB=0))


def planned(*overrides: str) -> Plan:
    """The plan of the example with some keys changed."""
    return Job.of(load_config(ROOT / "configs" / "gpt_stdlib.yaml", overrides)).plan()


if __name__ == "__main__":
    main()
