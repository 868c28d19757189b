"""The commands as a user runs them, each in a process of its own with its own virtual devices."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_process import ROOT, environment

from piper_jax.config import load_config

pytestmark = [pytest.mark.needs_jax, pytest.mark.timeout(240)]


def piper(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ``piper`` in a process of its own."""
    command = [sys.executable, "-c", "from piper_jax.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, check=False)


def test_plan_prints_stages_directives_and_grid():
    done = piper("plan", "configs/gpt_tiny.yaml")
    assert done.returncode == 0, done.stderr
    assert "plan  stages=2 microbatches=4 groups=2 devices=4" in done.stdout
    assert "1F1B  stages=2 microbatches=4  F=1 B=2  makespan=15  bubble=0.200" in done.stdout
    assert "1 | .  F0 B0 =  F1 B1 =  F2 B2 =  F3 B3 =  .  ." in done.stdout


def test_plan_says_in_the_users_terms_what_cannot_be_planned():
    overrides = ("strategy.pipeline_parallel=8", "devices.num_virtual=16", "train.batch_size=32")
    done = piper("plan", "configs/gpt_tiny.yaml", *overrides)
    assert done.returncode == 1
    assert "the model has 4 units, too few for 8 stages" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.sample
def test_train_learns_and_says_how_well(tmp_path: Path):
    overrides = ("train.steps=20", "evaluation.every=10", "profile.steps=[3,4]", "logging.peak_flops=1e9")
    overrides += ("optimizer.ema_decay=0.5", "evaluation.use_ema=true")
    done = piper("train", "configs/gpt_tiny.yaml", f"folder={tmp_path}", *overrides)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+/20  loss (\d+\.\d+)", done.stdout)]
    assert losses[0] > 5.4
    assert losses[-1] < losses[0] - 1.0
    assert "step 10/20  held-out loss" in done.stdout
    assert re.search(r"unigram entropy  [23]\.\d+ nats per byte", done.stdout)
    assert re.search(r"held-out loss    \d\.\d+ nats per byte", done.stdout)
    assert "tokens/s" in done.stdout
    assert load_config(tmp_path / "config.yaml").train.steps == 20
    formula = r"mfu    \(6 N \+ 12 x 128 x 32\) x tokens/s / \(4 x 1e\+09 FLOP/s, .*\), N = 57,632 active parameters"
    assert re.search(formula, done.stdout)

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 21))
    assert f"{steps[0]['loss']:.3f}" == f"{losses[0]:.3f}"
    assert steps[0]["learning_rate"] == pytest.approx(1e-2)
    assert all(line["grad_norm"] > 0.1 for line in steps)
    last, per_token = steps[-1], 6 * 57_632 + 12 * 128 * 32
    assert last["mfu"] == pytest.approx(last["tokens_per_second"] * per_token / 4e9)
    assert [line["step"] for line in lines if "held_out_loss" in line] == [10, 20]
    assert [line["step"] for line in lines if "bubble_measured" in line] == [3]
    assert lines[0]["bubble_simulated"] == pytest.approx(0.2)
    assert lines[0]["peak_bytes_simulated"] > 1e6
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert list((tmp_path / "tensorboard").glob("plugins/profile/*/*.xplane.pb"))
    assert (tmp_path / "piper-profile.html").stat().st_size > 1000


@pytest.mark.sample
@pytest.mark.parametrize(
    "overrides",
    [
        ("data.packing=documents", "data.max_bytes=null", "model.arguments.vocab_size=257"),
        pytest.param(
            ("model.name=gpt_linen", "strategy.directives=GPipe", "model.arguments.tied_embeddings=true"),
            marks=pytest.mark.full,
        ),
        ("model.arguments.compute_dtype=bfloat16", "model.arguments.dropout=0.1"),
    ],
    ids=["nnx-packed", "linen-gpipe-tied", "bfloat16-dropout"],
)
def test_check_finds_a_planned_step_equal_to_one_device(overrides: tuple[str, ...]):
    done = piper("check", "configs/gpt_tiny.yaml", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"all \d\d equal one device to (2e-05 \(float32\)|0.02 \(bfloat16\))", done.stdout)


@pytest.mark.sample
def test_simulate_measures_and_shows_the_real_step_beside_the_simulated_one(tmp_path: Path):
    drawing = tmp_path / "measured.json"
    done = piper("simulate", "configs/gpt_tiny.yaml", "--costs", "measured", "-o", str(drawing))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"1F1B  stages=2 microbatches=4  measured.*makespan=\d", done.stdout)
    assert re.search(r"real step       \d+\.\d+ m?s, median of 8: ", done.stdout)
    assert re.search(r"simulated step  \d+\.\d+ m?s, \d+\.\d\d of it: makespan .*, outside the plan ", done.stdout)
    assert drawing.stat().st_size > 100


@pytest.mark.sample
def test_check_runs_one_node_alone():
    done = piper("check", "configs/gpt_tiny.yaml", "--node", "F[PP=0,MB=2]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^  value add\.\d+ +\[2, 1, 32, 32\] +float32 +\d", done.stdout, re.MULTILINE)
    assert re.search(r"F\[PP=0,MB=2\] .* equals one device to 2e-05\.", done.stdout)
    missing = piper("check", "configs/gpt_tiny.yaml", "--node", "F[PP=3,MB=2]")
    assert missing.returncode == 1
    assert "FilterError: there is no node 'F[PP=3,MB=2]'.\nhelp: did you mean 'F[PP=1,MB=2]'?" in missing.stderr


def test_the_doctor_says_what_is_broken_and_fails(tmp_path: Path):
    done = piper("doctor", "--folder", str(tmp_path / "run"), JAX_PLATFORMS="cuda")
    assert done.returncode == 1, done.stderr
    assert re.search(r"^devices     BROKEN: .*\n +help: unset JAX_PLATFORMS", done.stdout, re.MULTILINE)
    assert re.search(r"^jax         0\.\d+", done.stdout, re.MULTILINE)
    assert re.search(r"^folder      .*/run: [\d,.]+ GB free", done.stdout, re.MULTILINE)


def test_too_few_devices_are_named_before_anything_is_compiled(tmp_path: Path):
    done = piper("train", "configs/gpt_tiny.yaml", f"folder={tmp_path}", "devices.num_virtual=null")
    assert done.returncode == 1
    assert "RuntimeFault: the strategy needs 4 devices; JAX finds 1 (cpu)." in done.stderr
    assert "devices.num_virtual=4" in done.stderr
