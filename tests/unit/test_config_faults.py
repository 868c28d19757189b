"""Configurations that are wrong: each is a ConfigError that says where, what and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from piper_jax.config import load_config, load_config_text
from piper_jax.errors import MAX_LINES, ConfigError

BASE = """model: {name: gpt, arguments: {preset: tiny}}
strategy:
  data_parallel: 2
  pipeline_parallel: 4
  directives: 1F1B
optimizer:
  learning_rate: 1e-4
train: {steps: 100}
"""


def fault(*overrides: str, text: str = BASE) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, overrides, name="run.yaml")
    message = str(caught.value)
    assert len(message.splitlines()) <= MAX_LINES
    return message


@pytest.mark.parametrize(
    ("override", "said", "fix"),
    [
        (
            "train.stepz=3",
            "unknown key 'train.stepz'.",
            "did you mean 'steps'?",
        ),
        (
            "steps=3",
            "unknown key 'steps'.",
            "did you mean 'train.steps'?",
        ),
        (
            "optimizer.lr=1",
            "unknown key 'optimizer.lr'.",
            "did you mean 'learning_rate'?",
        ),
        (
            "train.steps=abc",
            "train.steps = 'abc': a whole number is expected.",
            "the default is 100.",
        ),
        (
            "train.steps=1.5",
            "train.steps = 1.5: a whole number is expected.",
            "the default is 100.",
        ),
        (
            "train.steps=true",
            "train.steps = True: a whole number is expected.",
            "the default is 100.",
        ),
        (
            "train.seed=-1",
            "train.seed = -1: a number from 0 is expected.",
            "the default is 0.",
        ),
        (
            "optimizer.learning_rate='1e-4'",
            "optimizer.learning_rate = '1e-4': a number is expected.",
            "the default is 0.0003.",
        ),
        (
            "optimizer.name=adan",
            "optimizer.name = 'adan': 'adamw', 'adam', 'sgd', 'lion', 'adafactor' or 'muon' is expected.",
            "the default is adamw.",
        ),
        (
            "data.held_out_fraction=.nan",
            "data.held_out_fraction = nan: a finite number is expected.",
            "the default is 0.05.",
        ),
        (
            "train=3",
            "train = 3: a section with keys is expected.",
            "see the configurations in configs/.",
        ),
        (
            "train.steps.x=1",
            "train.steps is a value, it has no keys.",
            "set train.steps=... as a whole.",
        ),
        (
            "train.steps",
            "not of the form key=value.",
            "such as train.steps=20.",
        ),
        (
            "strategy.directives=[1f1b]",
            "strategy.directives: there is no strategy '1f1b'.",
            "did you mean '1F1B'?",
        ),
        (
            "strategy.directives=[{name: ZeRO-3, gather_distanc: 1}]",
            "strategy.directives: ZeRO-3 has no option 'gather_distanc'.",
            "did you mean 'gather_distance'?",
        ),
        (
            "model.arguments.num_layer=3",
            "model.arguments: gpt: there is no argument 'num_layer'.",
            "did you mean 'num_layers'?",
        ),
        (
            "model.arguments.compute_dtype=fp32",
            "model.arguments: gpt: compute_dtype='fp32' has the wrong type.",
            "give one of float32, bfloat16, float64.",
        ),
        (
            "model.name=gptt",
            "there is no model 'gptt'.",
            "did you mean 'gpt'? Or an import path such as my_package.my_module:language_model.",
        ),
        (
            "train.batch_size=30",
            "train.batch_size = 30 does not divide into 8 microbatches x 2 replicas.",
            "use a multiple of 16, such as 32.",
        ),
        (
            "devices={platform: cpu, num_virtual: 4}",
            "devices.num_virtual = 4, but the strategy needs 8 devices.",
            "set devices.num_virtual=8, or lower a degree of the strategy.",
        ),
        (
            "devices.num_virtual=8",
            "devices.num_virtual needs devices.platform = cpu.",
            "set devices.platform=cpu, or leave num_virtual out.",
        ),
        (
            "optimizer.warmup_steps=500",
            "optimizer.warmup_steps = 500 leaves nothing of train.steps = 100.",
            "use fewer, such as 10.",
        ),
        (
            "optimizer.momentum=0.5",
            "optimizer.momentum: adamw has no such key.",
            "adamw has b1, b2, eps, weight_decay.",
        ),
        (
            "optimizer.decay_fraction=0.5",
            "optimizer.decay_fraction: cosine has no such key.",
            "cosine has final_fraction.",
        ),
        (
            "optimizer.decay_paths='['",
            "optimizer.decay_paths.0: '[' is no regular expression: unterminated character set at position 0.",
            r"such as '\.kernel$'.",
        ),
        (
            "evaluation.use_ema=true",
            "evaluation.use_ema: no average of the parameters is kept.",
            "set optimizer.ema_decay, such as 0.999.",
        ),
        (
            "profile=true",
            "profile = True: a window of steps such as profile.steps=[10,12] is expected.",
            "the default is null.",
        ),
        (
            "profile.steps=[12,10]",
            "profile.steps = [12, 10] is no window of train.steps = 100.",
            "give the first and the last step of it, such as [10, 12].",
        ),
        (
            "logging.wandb={project: a, entiti: b}",
            "unknown key 'logging.wandb.entiti'.",
            "did you mean 'entity'?",
        ),
    ],
)
def test_a_wrong_override_is_named_with_what_would_be_right(override: str, said: str, fix: str):
    assert fault(override) == f"override {override!r}: {said}\nhelp: {fix}"


def test_a_wrong_line_of_the_file_is_named():
    text = BASE.replace("learning_rate", "learning_rat")
    assert fault(text=text) == (
        "run.yaml:7: unknown key 'optimizer.learning_rat'.\nhelp: did you mean 'learning_rate'?"
    )


def test_several_faults_are_one_message():
    message = fault("optimizer.lr=1", "train.steps=x", "train.a=1")
    assert message.splitlines()[0] == "run.yaml: 3 faults."
    assert "unknown key 'optimizer.lr'. did you mean 'learning_rate'?" in message
    assert "train.steps = 'x': a whole number is expected." in message


def test_twenty_faults_stay_within_twelve_lines():
    message = fault(*(f"train.unknown{k}=1" for k in range(20)))
    assert "20 faults" in message
    assert "more lines" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {steps: 1", "run.yaml:1: not YAML: expected ',' or '}', but got '<stream end>'."),
        ("train:\n\tsteps: 1", "run.yaml:2: not YAML: found character '\\t' that cannot start any token."),
        ("- train", "run.yaml: not a mapping of sections."),
        ("train:\n  steps: 1\n  steps: 2", "run.yaml:3: train.steps is given twice."),
        ("train: !!python/object:os.system {}", "run.yaml:1: not YAML: could not determine a constructor for the tag "),
    ],
)
def test_text_that_is_no_mapping_is_refused(text: str, message: str):
    assert fault(text=text).startswith(message)


def test_a_file_that_is_not_there_suggests_its_neighbour(tmp_path: Path):
    (tmp_path / "small.yaml").write_text("")
    with pytest.raises(
        ConfigError, match=r"smal\.yaml: No such file or directory\.\nhelp: did you mean '.*small\.yaml'"
    ):
        load_config(tmp_path / "smal.yaml")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(tmp_path / "binary.yaml")


def test_a_strategy_file_that_fails_is_named(tmp_path: Path):
    (tmp_path / "broken.py").write_text("1/0")
    message = fault(f"strategy.files={tmp_path / 'broken.py'}")
    assert "broken.py fails at broken.py:1: ZeroDivisionError: division by zero" in message
