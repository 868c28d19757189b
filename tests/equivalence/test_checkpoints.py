"""What one plan saves, any other plan of the model loads, bit for bit; so does Orbax alone. Damage is named."""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from oracle import Problem, strategy
from safetensors.numpy import load_file
from test_mixtures import SIGMOID, problem

import piper_jax as piper
from piper_jax.checkpoint.folder import StepFolder
from piper_jax.cli.inspecting import inspect_checkpoint
from piper_jax.errors import CheckpointError
from piper_jax.runtime.host_state import HostState
from piper_jax.runtime.training import Train

SAVED = {"stages": 4, "data": 2, "microbatches": 8, "zero_stage": 3}
OTHERS: list[dict[str, Any]] = [
    {},
    {"stages": 2, "expert_parallel": 2, "microbatches": 2},
    {"data": 8, "zero_stage": 1},
    {"stages": 2, "data": 2, "microbatches": 4, "schedule": "DualPipeV", "zero_stage": 2},
    {"expert_parallel": 4, "data": 2, "zero_stage": 3},
    {"stages": 2, "data": 2, "microbatches": 4, "schedule": "Interleaved1F1B", "zero_stage": 3},
]


def adamw() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, mu_dtype="bfloat16"))


@pytest.fixture(scope="module")
def tested() -> Problem:
    return replace(problem(SIGMOID | {"num_layers": 4}), optimizer=adamw())


@pytest.fixture(scope="module")
def traced(tested: Problem) -> piper.Plan:
    return piper.trace(tested.loss_fn, tested.params, tested.batch, optimizer=tested.optimizer)


def uncompiled(traced: piper.Plan, layout: dict[str, Any]) -> Train:
    """A plan that places states and runs nothing, so that it need not be compiled."""
    return Train(plan=traced.apply(strategy(**layout)), devices=tuple(jax.devices()))


def scrambled(found: HostState) -> HostState:
    """Other values everywhere, so that no two leaves are alike."""
    random = np.random.default_rng(0)

    def other(value: np.ndarray) -> np.ndarray:
        return random.integers(1, 100, value.shape).astype(value.dtype)

    params, opt_state = ({k: other(v) for k, v in part.items()} for part in (found.params, found.opt_state))
    return replace(found, params=params, opt_state=opt_state, random_key=np.array([7, 9], np.uint32), step=5)


def equal(found: HostState, expected: HostState) -> bool:
    pairs = ((found.params, expected.params), (found.opt_state, expected.opt_state))
    same = all([*a] == [*b] and all(_bits(a[k]) == _bits(b[k]) for k in a) for a, b in pairs)
    return same and found.step == expected.step and _bits(found.random_key) == _bits(expected.random_key)


def _bits(value: np.ndarray) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.tobytes()


@pytest.fixture(scope="module")
def written(tested: Problem, traced: piper.Plan, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HostState]:
    train = uncompiled(traced, SAVED)
    host = scrambled(train.to_host(train.init(tested.params)))
    checkpoints = piper.Checkpointer(path=tmp_path_factory.mktemp("run") / "checkpoints")
    checkpoints.save(train, train.from_host(host), data={"position": 3})
    assert checkpoints.wait() == 5
    return Path(checkpoints.path), host


@pytest.fixture(scope="module")
def plain(traced: piper.Plan) -> Train:
    return uncompiled(traced, {})


@pytest.mark.parametrize("layout", OTHERS, ids=lambda v: "-".join(map(str, v.values())) or "one")
def test_any_plan_loads_what_another_saved(
    traced: piper.Plan, written: tuple[Path, HostState], layout: dict[str, Any]
) -> None:
    path, host = written
    train = uncompiled(traced, layout)
    found = piper.Checkpointer(path=path).restore(train)
    assert (found.step, found.data) == (5, {"position": 3})
    assert equal(train.to_host(found.state), host)
    own = [*map(_bits, map(np.asarray, jax.tree.leaves(train.opt_state(found.state))))]
    assert own == [*map(_bits, host.opt_state.values())]
    params = nnx.state(train.params(found.state), nnx.Param)
    for keys, value in nnx.to_flat_state(params):
        np.testing.assert_array_equal(value[...], host.params[tuple(map(str, keys))])


def test_orbax_and_flax_alone_load_the_parameters(tested: Problem, written: tuple[Path, HostState]) -> None:
    path, host = written
    saved = ocp.StandardCheckpointer().restore(path / "5" / "params")
    model = nnx.clone(tested.params)
    state = nnx.state(model)
    nnx.replace_by_pure_dict(state, nnx.restore_int_paths(saved))
    nnx.update(model, state)
    leaves = {tuple(map(str, keys)): value[...] for keys, value in nnx.to_flat_state(nnx.state(model))}
    assert leaves.keys() == host.params.keys()
    assert all(np.array_equal(leaves[keys], value) for keys, value in host.params.items())


# -- damage --------------------------------------------------------------------------------------------------------
KERNEL = "layers.1.mlp.shared.up.kernel"


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def missing(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("file", ["params/" + KERNEL + "/0.0", "opt_state/1.0.mu." + KERNEL + "/.zarray"])
@pytest.mark.parametrize("damage", [flipped, truncated, missing])
def test_a_damaged_leaf_is_named(
    plain: Train, written: tuple[Path, HostState], tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    path = shutil.copytree(written[0], tmp_path / "checkpoints")
    damage(path / "5" / file)
    with pytest.raises(CheckpointError) as caught:
        piper.Checkpointer(path=path).restore(plain)
    item, leaf, _ = file.split("/")
    assert str(caught.value).startswith(f"checkpoint of step 5 is damaged: {item} {leaf}.\n    {item} {leaf}: ")
    assert str(path / "5" / item / leaf) in str(caught.value)
    assert "checkpoint.on_corrupt=previous" in str(caught.value)


def test_the_newest_whole_step_is_used_if_told_so(
    plain: Train, written: tuple[Path, HostState], tmp_path: Path
) -> None:
    path = shutil.copytree(written[0], tmp_path / "checkpoints")
    checkpoints = piper.Checkpointer(path=path)
    for step in (6, 7):
        checkpoints.save(plain, plain.from_host(replace(written[1], step=step)))
    checkpoints.wait()
    flipped(path / "7" / "manifest" / "manifest.json")
    truncated(path / "6" / "params" / KERNEL / "0.0")
    found = checkpoints.restore(plain, on_corrupt="previous")
    assert [error.data["step"] for error in found.passed_over] == [7, 6]
    assert equal(plain.to_host(found.state), written[1])


def test_a_state_of_another_model_is_refused(tested: Problem, written: tuple[Path, HostState]) -> None:
    other = piper.trace(tested.loss_fn, tested.params, tested.batch, optimizer=optax.sgd(0.1, momentum=0.9))
    with pytest.raises(CheckpointError, match=r"checkpoint of step 5: opt_state 0\.trace\..* is missing, but float32"):
        piper.Checkpointer(path=written[0]).restore(uncompiled(other, {}))


# -- looking into one ----------------------------------------------------------------------------------------------
def test_parameters_are_exported_by_their_paths(written: tuple[Path, HostState], tmp_path: Path) -> None:
    path, host = written
    file = tmp_path / "params.safetensors"
    assert inspect_checkpoint(path / "5", None, verify=False, export=file) == 0
    found = load_file(file)
    assert found.keys() == {".".join(keys) for keys in host.params}
    assert all(_bits(found[".".join(keys)]) == _bits(value) for keys, value in host.params.items())


def test_an_inspection_verifies_every_leaf(
    written: tuple[Path, HostState], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copytree(written[0], tmp_path / "checkpoints")
    assert inspect_checkpoint(tmp_path, None, verify=True, export=None) == 0
    assert "all are what was written" in capsys.readouterr().out
    flipped(path / "5" / "params" / KERNEL / "0.0")
    assert inspect_checkpoint(tmp_path, 5, verify=True, export=None) == 3
    said = capsys.readouterr().out
    assert re.search(rf"^params {KERNEL} +\[8, 8\] +float32 +256 B  \w{{12}} DAMAGED$", said, re.MULTILINE)
    assert re.search(rf"^DAMAGED  params {KERNEL}: .*{path / '5' / 'params' / KERNEL}", said, re.MULTILINE)


def test_the_newest_and_every_tenth_step_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20, 25):
        (tmp_path / str(step)).mkdir()
    (tmp_path / "30.orbax-checkpoint-tmp").mkdir()
    folder = StepFolder(path=tmp_path, keep=2, keep_every=10)
    folder.prune()
    assert folder.steps() == [10, 20, 25]
    folder.sweep()
    assert sorted(found.name for found in tmp_path.iterdir()) == ["10", "20", "25"]
    with pytest.raises(CheckpointError, match="there is no step 30"):
        folder.existing(30)
    assert folder.set_aside(25).name == "25.damaged"
    assert folder.steps() == [10, 20]


# -- saving --------------------------------------------------------------------------------------------------------
def test_a_save_that_fails_is_told_and_the_step_before_stays(
    plain: Train, written: tuple[Path, HostState], tmp_path: Path
) -> None:
    """The system refuses files beyond a size, as it does on a full disk: in the background, after ``save``."""
    path = shutil.copytree(written[0], tmp_path / "checkpoints")
    state = plain.from_host(replace(written[1], step=9))
    checkpoints = piper.Checkpointer(path=path, keep=1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limit[1]))
        checkpoints.save(plain, state)
        with pytest.raises(CheckpointError, match=r"step 9 could not be saved in .*: File too large"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert checkpoints.steps() == [5]
    checkpoints.save(plain, plain.from_host(replace(written[1], step=10)))
    assert checkpoints.wait() == 10
    assert checkpoints.steps() == [10]
