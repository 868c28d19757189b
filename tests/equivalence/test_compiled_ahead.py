"""Plans compiled for H100 without one: collectives of slots run beside matrix products. On CPU devices, the report."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from oracle import adamw
from tiny_models import Tower, mean_loss, tokens

import piper_jax as piper
from piper_jax.errors import ConfigError
from piper_jax.ir.nodes import Compute
from piper_jax.targets.ahead import compile_ahead
from piper_jax.targets.costs import compiled_costs
from piper_jax.targets.report import TargetReport

OPTIMIZED = True
ROOT = Path(__file__).resolve().parents[2]
LAYERS, WIDTH, ROWS, MICROBATCHES = 4, 512, 2048, 4

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
with_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs piper-jax[cuda-aot]"
)
with_tpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs piper-jax[tpu-aot]")


class Wide(nnx.Module):
    """Layers of two matrix products, in bfloat16."""

    def __init__(self, rngs: nnx.Rngs):
        sizes = ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        self.layers = nnx.List(
            [
                nnx.List([nnx.Linear(*s, use_bias=False, dtype=jnp.bfloat16, rngs=rngs) for s in sizes])
                for _ in range(LAYERS)
            ]
        )

    def __call__(self, x: Any) -> Any:
        for up, down in self.layers:
            with piper.annotate("PP"):
                x = x + down(jax.nn.gelu(up(x)))
        return x


def _loss(model: Wide, batch: Any) -> Any:
    return jnp.mean((model(batch["x"]) - batch["y"]).astype(jnp.float32) ** 2)


def wide_plan(stage: int, replicas: int) -> piper.Plan:
    """Every layer a stage of its own, all on one group, under ZeRO with communication on streams of its own."""
    model = nnx.eval_shape(lambda: Wide(nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((ROWS * replicas * MICROBATCHES, WIDTH), jnp.bfloat16)
    stages = piper.directive("Interleaved1F1B", num_virtual_stages=LAYERS)
    sharded = piper.directive(f"ZeRO-{stage}", communication_overlap=True)
    strategy = piper.Strategy(data_parallel=replicas, num_microbatches=MICROBATCHES, directives=(stages, sharded))
    return piper.trace(_loss, model, {"x": x, "y": x}, optimizer=adamw()).apply(strategy)


@cache
def on_h100(stage: int, replicas: int) -> TargetReport:
    return compile_ahead(wide_plan(stage, replicas), f"gpu:h100:1x{replicas}")


@with_cuda
@pytest.mark.parametrize(("stage", "replicas"), [(2, 4), (2, 8), (3, 4), (3, 8)])
def test_collectives_inside_slots_run_beside_matrix_products(stage: int, replicas: int) -> None:
    report = on_h100(stage, replicas)
    inside = [(p, u) for p, u in report.collectives if p.role == "compute" and not p.is_alone]
    assert {u.kind for _, u in inside} == {"reduce-scatter"} | ({"all-gather"} if stage == 3 else set())
    assert all(u.is_asynchronous and u.num_products for _, u in inside), str(report)
    assert all(u.group_size == replicas for _, u in inside)


@with_cuda
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_exposed_is_alone_at_the_ends_of_the_step(stage: int) -> None:
    """The first gather has nothing before it, and the last reduction nothing after it but the update."""
    report = on_h100(stage, 8)
    exposed = [(p, u) for p, u in report.collectives if not u.is_hidden and p.role != "exchange"]
    assert [(p.num_runs, u.kind) for p, u in exposed] == [(1, "all-gather")] * (stage == 3) + [(1, "reduce-scatter")]
    assert all(p.is_alone for p, _ in exposed)


@with_cuda
def test_equal_layers_are_compiled_once() -> None:
    report = on_h100(3, 8)
    assert max(p.num_runs for p in report.programs) >= 2 * MICROBATCHES - 2
    assert len(report.programs) <= sum(p.num_runs for p in report.programs) / 2


@with_cuda
def test_flops_are_counted_and_memory_is_known() -> None:
    forward = next(p for p in on_h100(2, 8).programs if p.label == "F1 g0")
    assert forward.flops == 2 * 2 * ROWS * WIDTH * 4 * WIDTH
    assert forward.argument_bytes == 2 * 4 * WIDTH * 4 * WIDTH + 2 * ROWS * WIDTH


@with_cuda
def test_the_command_prints_the_report() -> None:
    command = [sys.executable, "-m", "piper_jax", "compile", "configs/gpt_tiny.yaml", "--target", "gpu:h100:1x4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "target   gpu:h100:1x4, 4 of 4 devices" in done.stdout
    assert "collectives of a step run beside compute" in done.stdout


@with_tpu
def test_a_pipeline_compiles_for_boxes_of_a_slice_and_its_cycles_are_costs() -> None:
    strategy = piper.Strategy(data_parallel=4, pipeline_parallel=2, num_microbatches=2)
    plan = piper.trace(mean_loss, Tower(layers=2), tokens(), optimizer=adamw()).apply(strategy)
    report = compile_ahead(plan, "tpu:v5e:4x2")
    assert str(report).count("ici, 2x2 chips from") == 2
    assert all(p.cycles for p in report.programs if p.role == "compute")
    assert piper.simulate(plan, costs=compiled_costs(report)).costs == "compiled tpu:v5e:4x2"


@with_tpu
def test_a_plan_compiles_for_tpu() -> None:
    strategy = piper.Strategy(data_parallel=4, num_microbatches=2, directives=(piper.directive("ZeRO-1"),))
    plan = piper.trace(mean_loss, Tower(layers=2), tokens(), optimizer=adamw()).apply(strategy)
    report = compile_ahead(plan, "tpu:v5e:2x2")
    assert report.num_collectives
    assert all(p.flops for p in report.programs if p.role == "compute")


# -- without any other compiler ---------------------------------------------------------------------------
def pipeline() -> piper.Plan:
    strategy = piper.Strategy(data_parallel=2, pipeline_parallel=4, num_microbatches=4)
    return piper.trace(mean_loss, Tower(layers=4), tokens(), optimizer=adamw()).apply(strategy)


def test_nothing_is_put_on_the_devices_of_a_target_and_each_pass_gets_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = pipeline()
    for name in ("device_put", "make_array_from_single_device_arrays"):
        monkeypatch.setattr(jax, name, lambda *a, **k: pytest.fail("an array was placed"))
    report = compile_ahead(plan, "cpu", options={"xla_cpu_enable_fast_math": False})
    assert str(report).startswith("target   cpu:8, 8 of 8 devices")
    assert report.num_transfers == 2 * 3 * 4
    assert "xla_cpu_enable_fast_math=false" in str(report)
    shared = [p for p in report.programs if len(p.groups) > 1 and p.role == "compute"]
    assert shared
    assert len({p.label for p in report.programs}) == len(report.programs)
    assert all(p.accessed_bytes and p.work for p in report.programs if p.role == "compute")
    costs = compiled_costs(report)
    nodes = plan.complete().nodes.values()
    assert all(costs.seconds[n.id] > 0 for n in nodes if isinstance(n, Compute))
    assert piper.simulate(plan, costs=costs).costs == "compiled cpu:8, 1.00 groups at once"


def test_a_target_that_is_too_small_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(ConfigError, match="has 4 devices; the plan needs 8"):
        compile_ahead(pipeline(), "gpu:h100:1x4")
