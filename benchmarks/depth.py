"""What depth costs: layers in a list and under ``scan``, 16 and 96 of them on eight stages.

Counts compiled programs; prints the first call of many layers as a ratio to that of few, each in a fresh process, and
the seconds of tracing and planning many layers with 64 microbatches. All in seconds of the processors.

Run: ``python benchmarks/depth.py [rounds]``
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
STAGES = 8
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={STAGES}"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import jax.numpy as jnp
import optax

import piper_jax as piper

FEW, MANY = 16, 96
DIM, LENGTH, ROWS, HEADS = 64, 32, 64, 4
MICROBATCHES = 64


def layer(x: jax.Array, own: Any) -> jax.Array:
    """A transformer block ``[batch, length, dim] -> [batch, length, dim]``."""
    h = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * own["norm"]
    q, k, v = (jnp.reshape(h @ own[name], (*h.shape[:2], HEADS, -1)) for name in ("query", "key", "value"))
    x = x + jnp.reshape(jax.nn.dot_product_attention(q, k, v, is_causal=True), h.shape) @ own["out"]
    return x + jax.nn.gelu(x @ own["up"]) @ own["down"]


def problem(kind: str, layers: int) -> tuple[Any, Any, Any]:
    """Loss, parameters and batch."""
    shapes = dict.fromkeys(("query", "key", "value", "out"), (DIM, DIM))
    shapes |= {"norm": (DIM,), "up": (DIM, 4 * DIM), "down": (4 * DIM, DIM)}
    stack = {
        name: 0.1 * jax.random.normal(jax.random.key(k), (layers, *shape))
        for k, (name, shape) in enumerate(shapes.items())
    }
    rest = {"embed": jnp.eye(DIM), "head": jnp.eye(DIM)}

    def region(x: Any, own: Any) -> Any:
        with piper.annotate("PP"):
            return layer(x, own)

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["embed"]
        if kind == "scan":
            x = jax.lax.scan(lambda x, own: (region(x, own), None), x, params["layers"])[0]
        else:
            for own in params["layers"]:
                x = region(x, own)
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

    listed = stack if kind == "scan" else [jax.tree.map(lambda v, k=k: v[k], stack) for k in range(layers)]
    x = jax.random.normal(jax.random.key(9), (ROWS, LENGTH, DIM))
    return loss_fn, {**rest, "layers": listed}, {"x": x, "y": jnp.sin(x)}


def first_call(kind: str, layers: int, microbatches: int) -> dict[str, Any]:
    """Seconds of planning and of everything until the first loss, and what was compiled for it."""
    loss_fn, params, batch = problem(kind, layers)
    jax.block_until_ready((params, batch))
    strategy = piper.Strategy(pipeline_parallel=STAGES, num_microbatches=microbatches)
    start = time.process_time()
    plan = piper.trace(loss_fn, params, batch, optimizer=optax.adamw(1e-3)).apply(strategy)
    plan.check()
    planned = time.process_time() - start
    if microbatches == MICROBATCHES:
        return {"planned": planned}
    train = piper.compile(plan)
    compiled = time.process_time() - start
    state = train.init(params)
    begun = time.process_time() - start
    state, metrics = train.step(state, batch)
    jax.block_until_ready((state, metrics))
    called = time.process_time() - start
    state, metrics = train.step(state, batch)
    jax.block_until_ready((state, metrics))
    again = time.process_time() - start - called
    return {
        "planned": planned, "compiled": compiled, "init": begun, "called": called, "again": again,
        "programs": train.compiler.num_compiles,
    }  # fmt: skip


def _in_fresh_process(*arguments: Any) -> dict[str, Any]:
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print(f"{FEW} and {MANY} transformer blocks, d={DIM}, 1F1B, {STAGES} stages")
    for kind in ("list", "scan"):
        runs = [[_in_fresh_process(kind, n, 2 * STAGES) for n in (FEW, MANY)] for _ in range(rounds)]
        few, many = runs[0]
        ratio = statistics.median(b["called"] / a["called"] for a, b in runs)
        seconds = [statistics.median(run[k]["called"] for run in runs) for k in (0, 1)]
        planned = statistics.median(_in_fresh_process(kind, MANY, MICROBATCHES)["planned"] for _ in range(rounds))
        print(
            f"{kind}: {few['programs']} and {many['programs']} programs; first call {seconds[0]:.1f} and "
            f"{seconds[1]:.1f} s, ratio {ratio:.2f}; {MICROBATCHES} microbatches planned in {planned:.1f} s"
        )


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(first_call(sys.argv[1], *map(int, sys.argv[2:]))))
    else:
        main()
