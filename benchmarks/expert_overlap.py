"""All_to_all bytes that XLA's schedule puts beside matrix products, with and without overlap slots.

    python benchmarks/expert_overlap.py gpu:h100:1x8 [num_layers]

The mixture of 1 billion parameters (16 layers, or fewer) under DualPipeV, two ranks x a half of the target. Needs the
compiler of the target (``piper-jax[cuda-aot]`` or ``[tpu-aot]``).
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import optax

import piper_jax as piper
from piper_jax.models import moe
from piper_jax.targets.ahead import compile_ahead
from piper_jax.targets.profiles import parse_target
from piper_jax.targets.report import ProgramReport

ROWS, LENGTH, MICROBATCHES = 1, 1024, 4  # of a slice


def main(target: str, num_layers: int = 16) -> None:
    """Prints a line for each of the two."""
    experts = parse_target(target).num_devices // 2
    model = moe.language_model(preset="1B", num_layers=num_layers)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((MICROBATCHES * experts * ROWS, LENGTH), jnp.int32)
    plan = piper.trace(model.loss_fn, params, {"tokens": tokens, "targets": tokens}, optimizer=optax.adamw(1e-3))
    print(f"1B with {num_layers} layers, pipeline 2 x expert {experts}, DualPipeV, {target}, {LENGTH} tokens a slice")
    for overlap in (True, False):
        strategy = piper.Strategy(
            pipeline_parallel=2, expert_parallel=experts, num_microbatches=MICROBATCHES,
            directives=(piper.directive("DualPipeV", communication_overlap=overlap),),
        )  # fmt: skip
        report = compile_ahead(plan.apply(strategy), target)
        slots = [p for p in report.programs if p.role == "compute"]
        print(f"overlap slots {'on' if overlap else 'off'}; {len(slots)} programs, {report.seconds:.0f} s")
        fused = [p for p in slots if {"F", "B"} <= {word[0] for word in p.label.split()}] if overlap else slots
        _line("  F and B in one program" if overlap else "  all programs", fused)
        if overlap:
            _line("  all programs", slots)


def _line(what: str, programs: list[ProgramReport]) -> None:
    """Shares of the bytes of all_to_alls in a step, by what runs beside them."""
    found = [(p.num_runs * u.num_bytes, u) for p in programs for u in p.collectives if u.kind == "all-to-all"]
    total = sum(nbytes for nbytes, _ in found) or 1
    shares = [
        sum(nbytes for nbytes, use in found if chosen(use)) / total
        for chosen in (
            lambda u: u.is_asynchronous, lambda u: u.is_hidden, lambda u: u.num_products > 0,
            lambda u: u.num_products_of_others > 0,
        )
    ]  # fmt: skip
    names = ("asynchronous", "beside compute", "beside matrix products", "beside those of the other pass")
    print(f"{what}: {len(found)} all_to_alls; " + ", ".join(f"{n} {s:.1%}" for n, s in zip(names, shares, strict=True)))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
