"""What the doctor says of versions, clusters and disks that are not as they should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from piper_jax import versions
from piper_jax.cli import diagnosis
from piper_jax.errors import ConfigError
from piper_jax.versions import TESTED, require_versions, version_faults

OLD = {"jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8", "optax": "0.2.8"}
NEW = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "flax": "0.12.12", "optax": "0.2.8"}
COMMAND = "pip install 'jax==0.12.*' 'jaxlib==0.12.*' 'flax==0.12.12'"


@pytest.mark.parametrize(("python", "pair"), [((3, 11), OLD), ((3, 12), NEW), ((3, 14), NEW)])
def test_tested_pairs_have_no_fault(python: tuple[int, int], pair: dict[str, str]):
    assert version_faults(pair, python) == ()


@pytest.mark.parametrize(
    ("change", "is_broken", "what"),
    [
        ({"jaxlib": "0.10.2"}, True, "jax 0.12.0.1 and jaxlib 0.10.2 are no pair."),
        ({"jaxlib": "0.12.1"}, True, "jax 0.12.0.1 and jaxlib 0.12.1 are no pair."),
        ({"jax-cuda12-plugin": "0.11.0"}, True, "jax 0.12.0.1 and jax-cuda12-plugin 0.11.0 are no pair."),
        ({"flax": None}, True, "flax missing."),
        ({"flax": "0.12.1"}, False, "not tested: flax 0.12.1 (tested with 0.12.12)."),
        (
            {"jax": "0.13.0", "jaxlib": "0.13.0"},
            False,
            "not tested: jax 0.13.0 (tested with 0.12.*), jaxlib 0.13.0 (tested with 0.12.*).",
        ),
        ({"jaxlib": "0.12.0"}, None, ""),
    ],
)
def test_versions_that_do_not_fit(change: dict[str, str | None], is_broken: bool | None, what: str):
    pair = {name: version for name, version in {**NEW, **change}.items() if version is not None}
    found = version_faults(pair, (3, 12))
    if is_broken is None:
        assert found == ()
    else:
        assert (found[0].is_broken, found[0].what, found[0].help) == (is_broken, what, COMMAND)


def test_training_does_not_start_with_a_mixed_pair(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(versions, "installed_versions", lambda: {**NEW, "jaxlib": "0.9.0"})
    with pytest.raises(ConfigError, match=r"jaxlib 0.9.0 are no pair.\nhelp: pip install 'jax=="):
        require_versions()


def test_the_tested_versions_are_those_that_are_installed_with_the_package():
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    for tested in TESTED.values():
        for name, version in tested.items():
            assert f'"{name}=={version};' in text or f'"{name}>={version},' in text


def test_a_cluster_is_named_by_its_variables():
    found = diagnosis._cluster({"SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_NTASKS": "16"})
    assert [str(f) for f in found] == [
        "cluster     Slurm: SLURM_JOB_ID=7 SLURM_NTASKS=16 SLURM_PROCID=3",
        "processes   process 3 of 16, by Slurm",
    ]
    assert [f.text for f in diagnosis._cluster({})] == ["one"]
    *_, wrong = diagnosis._cluster({"JAX_NUM_PROCESSES": "2"})
    assert (wrong.is_broken, wrong.help) == (True, "set all three, or none.")


def test_a_folder_that_cannot_be_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    assert diagnosis._disk(tmp_path / "file" / "runs").is_broken
    fine = diagnosis._disk(tmp_path / "new" / "runs")
    assert not fine.is_broken
    assert " GB free" in fine.text
    monkeypatch.setattr(diagnosis, "LOW_BYTES", 10**18)
    assert "folder=" in diagnosis._disk(tmp_path).help
