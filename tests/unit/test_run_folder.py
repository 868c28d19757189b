"""The folder of a run, and what of two configurations differs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from piper_jax.config import differing_keys, load_config, load_config_text
from piper_jax.errors import ConfigError
from piper_jax.recording import RunFolder


def test_a_file_names_its_folder_unless_it_says_another(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("train: {steps: 3}")
    assert RunFolder.of(load_config(file)).path == Path("runs/mine")
    assert RunFolder.of(load_config(file, ["folder=elsewhere/a"])).path == Path("elsewhere/a")
    assert RunFolder.of(load_config_text("")).path == Path("runs/unnamed")


def test_the_saved_configuration_is_the_resolved_one(tmp_path: Path):
    config = load_config_text("train: {steps: 3}", [f"folder={tmp_path}/new/run"])
    folder = RunFolder.of(config)
    with pytest.raises(FileNotFoundError):
        folder.save(config)
    assert folder.saved() is None
    folder.make().save(config)
    assert folder.saved() == config
    assert "learning_rate: 0.0003" in folder.config.read_text()


def test_a_folder_that_cannot_be_is_a_config_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path, reason in (("file", "a file of that name is in the way"), ("file/below", "Not a directory")):
        with pytest.raises(ConfigError, match=f"{path}: {reason}"):
            RunFolder(tmp_path / path).make()


def test_keys_that_differ_are_named_with_both_values():
    before = load_config_text("train: {steps: 3}\nmodel: {arguments: {preset: tiny}}\nstrategy: {directives: 1F1B}")
    after = load_config_text("train: {steps: 4}\nmodel: {arguments: {dim: 8}}\nstrategy: {directives: GPipe}")
    assert [d.key for d in differing_keys(before, after)] == [
        "model.arguments.preset",
        "model.arguments.dim",
        "strategy.directives",
        "train.steps",
    ]
    assert str(differing_keys(before, after)[-1]) == "train.steps: 3 -> 4"
    assert differing_keys(before, before) == ()


def test_a_second_run_in_the_folder_is_refused_until_the_first_ends(tmp_path: Path):
    folder = RunFolder(tmp_path)
    said = rf"another run goes on in .* \(process {os.getpid()} on "
    with folder.locked(), pytest.raises(ConfigError, match=said), folder.locked():
        pass
    with folder.locked():
        pass
