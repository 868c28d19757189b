"""From a configuration to something that can be planned and run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from piper_jax.config import ModelSection, OptimizerSection, load_config, load_config_text
from piper_jax.errors import ConfigError, RuntimeFault
from piper_jax.models.moe_config import moe_config
from piper_jax.optimizers import build_optimizer, learning_rate
from piper_jax.simulation import simulate
from piper_jax.train.comparison import TOLERANCES, Comparison, Difference
from piper_jax.train.job import Job, build_model
from piper_jax.train.utilization import peak_of

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
TINY = CONFIGS[0].parent / "gpt_tiny.yaml"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_is_planned_checked_and_simulated(path: Path):
    job = Job.of(load_config(path))
    plan = job.plan().check()
    assert plan.num_stages in (job.strategy.pipeline_parallel, 2 * job.strategy.pipeline_parallel)
    assert plan.num_microbatches == job.strategy.resolved_num_microbatches
    exchanges = [node for node in plan.complete().nodes if node.op.startswith("all_to_all")]
    assert bool(exchanges) == (job.strategy.expert_parallel > 1)
    assert 0 <= simulate(plan).bubble < 0.5


def test_planning_touches_no_device():
    job = Job.of(load_config(TINY, ["strategy.data_parallel=128", "train.batch_size=512", "devices.num_virtual=256"]))
    plan = job.plan().check()
    assert plan.num_stages == 2
    with pytest.raises(RuntimeFault, match=r"needs 256 devices; JAX finds 8 \(cpu\)"):
        job.device_map(plan)


def test_the_model_may_be_any_import_path():
    section = ModelSection(name="piper_jax.models.gpt_linen:language_model", arguments={"preset": "tiny"})
    model = build_model(section)
    assert set(model.init(jax.random.key(0))) == {"embed", "head", "norm", *(f"layers_{k}" for k in range(4))}


def test_the_precision_of_compute_is_an_argument_of_the_model():
    job = Job.of(load_config(TINY, ["precision.compute=bfloat16"]))
    model = nnx.eval_shape(lambda: job.model.init(jax.random.key(0)))
    assert (model.layers[0].up.dtype, model.layers[0].up.kernel.dtype) == ("bfloat16", "float32")
    with pytest.raises(ConfigError, match="sqrt"):
        build_model(ModelSection(name="math:sqrt"), "bfloat16")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("no_such_package.models:make", {}, "model.name: no_such_package.models cannot be imported"),
        (
            "piper_jax.models.gpt:languge_model",
            {},
            "model.name: piper_jax.models.gpt has no function 'languge_model'.\nhelp: did you mean 'language_model'?",
        ),
        ("math:sqrt", {}, "model.arguments: math:sqrt: "),
        ("builtins:dict", {"a": 1}, "model.name: builtins:dict returns a dict."),
        ("piper_jax.models.gpt:language_model", {"dims": 3}, "gpt: there is no argument 'dims'."),
    ],
)
def test_a_model_that_cannot_be_made_is_a_config_error(name: str, arguments: dict[str, int], message: str):
    with pytest.raises(ConfigError) as caught:
        build_model(ModelSection(name=name, arguments=arguments))
    assert str(caught.value).startswith(message)


def test_the_learning_rate_warms_up_and_decays():
    rate = learning_rate(OptimizerSection(learning_rate=1.0, warmup_steps=10, final_fraction=0.1), 110)
    assert [float(rate(step)) for step in (0, 5, 10, 60, 110)] == pytest.approx([0.0, 0.5, 1.0, 0.55, 0.1])
    assert float(learning_rate(OptimizerSection(learning_rate=1.0), 100)(0)) == 1.0
    stable = learning_rate(OptimizerSection(learning_rate=1.0, warmup_steps=10, schedule="wsd"), 110)
    assert [float(stable(step)) for step in (5, 10, 90, 100, 110)] == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1])
    falling = learning_rate(OptimizerSection(learning_rate=1.0, schedule="linear", final_fraction=0.0), 100)
    assert [float(falling(step)) for step in (0, 50, 100)] == pytest.approx([1.0, 0.5, 0.0])
    constant = learning_rate(OptimizerSection(learning_rate=1.0, schedule="constant"), 100)
    assert float(constant(100)) == 1.0


def test_only_matrices_decay():
    section = OptimizerSection(learning_rate=0.1, weight_decay=0.5, clip_norm=None)
    optimizer, params = build_optimizer(section, 10), {"kernel": np.ones((2, 2)), "scale": np.ones(2)}
    updates, _ = optimizer.update(jax.tree.map(np.zeros_like, params), optimizer.init(params), params)
    changed = optax.apply_updates(params, updates)
    np.testing.assert_allclose(changed["kernel"], 0.95)
    np.testing.assert_allclose(changed["scale"], 1.0)


def test_the_parameters_that_decay_may_be_named():
    section = OptimizerSection(learning_rate=0.1, weight_decay=0.5, clip_norm=None, decay_paths=(r"^a\.",))
    params = {"a": {"scale": np.ones(2)}, "b": {"kernel": np.ones((2, 2))}}
    optimizer = build_optimizer(section, 10)
    updates, _ = optimizer.update(jax.tree.map(np.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_allclose(updates["a"]["scale"], -0.05)
    np.testing.assert_allclose(updates["b"]["kernel"], 0.0)
    wrong = build_optimizer(section.model_copy(update={"decay_paths": ("a", "b.kernl")}), 10)
    with pytest.raises(
        ConfigError, match=r"optimizer.decay_paths.1: 'b.kernl' matches no parameter.\nhelp: such as b.kernel"
    ):
        wrong.init(params)


def test_accumulated_gradients_are_one_update():
    section = OptimizerSection(name="sgd", momentum=0.0, learning_rate=1.0, warmup_steps=4, accumulate_steps=2)
    optimizer, params = build_optimizer(section, 10), {"a": np.zeros(1, np.float32)}
    state, seen = optimizer.init(params), []
    for gradient in (3.0, 1.0, 1.0, 3.0):
        updates, state = optimizer.update({"a": np.full(1, gradient, np.float32)}, state, params)
        seen.append((float(updates["a"][0]), float(state.grad_norm), float(state.learning_rate)))
    assert seen == [(0.0, 3.0, 0.0), (0.0, 1.0, 0.0), (0.0, 1.0, 0.5), (-0.5, 3.0, 0.5)]


def test_gradients_are_clipped_by_their_global_norm():
    params = {"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)}
    optimizer = build_optimizer(OptimizerSection(clip_norm=1.0, weight_decay=0.0), 10)
    state = optimizer.update(
        {"a": np.full(1, 30.0, np.float32), "b": np.full(1, 40.0, np.float32)}, optimizer.init(params), params
    )[1]
    first_moment = optax.tree.get(state, "mu")
    np.testing.assert_allclose(first_moment["a"], 0.1 * 0.6, rtol=1e-5)


def test_the_peak_is_that_of_the_devices_or_what_is_given():
    h100 = SimpleNamespace(id=0, process_index=0, platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    assert peak_of(None, [h100], "bfloat16") == (989e12, "bfloat16 on h100")
    assert peak_of(1e12, [h100], "bfloat16") == (1e12, "logging.peak_flops")
    cpu = SimpleNamespace(id=0, process_index=0, platform="cpu", device_kind="cpu")
    assert peak_of(None, [cpu], "float32")[0] is None
    unknown = SimpleNamespace(id=0, process_index=0, platform="gpu", device_kind="NVIDIA T4")
    assert peak_of(None, [unknown], "float32") == (
        None,
        "the peak of NVIDIA T4 is not known; logging.peak_flops=... gives it",
    )


def test_active_parameters_are_those_that_a_token_is_multiplied_by():
    config = moe_config(preset="tiny")
    model = build_model(ModelSection(name="moe", arguments={"preset": "tiny"}))
    assert model.num_active_parameters == config.num_active_parameters - config.vocab_size * config.dim
    assert model.attention_width == 4 * 4 * 8
    tied = build_model(ModelSection(name="gpt", arguments={"preset": "tiny", "tied_embeddings": True}))
    assert tied.num_active_parameters == sum(leaf.size for leaf in jax.tree.leaves(tied.shapes()))


def test_a_comparison_knows_what_exceeds_its_tolerance():
    leaves = [Difference(name=n, scale=1.0, relative=r) for n, r in (("loss", 0.0), ("a", 1e-4), ("b", float("nan")))]
    comparison = Comparison(differences=tuple(leaves), precision="float32", tolerance=TOLERANCES["float32"])
    assert [d.name for d in comparison.exceeding] == ["a", "b"]
    assert [d.name for d in comparison.worst] == ["b", "a", "loss"]


def test_directives_reach_the_plan():
    config = load_config_text("strategy: {pipeline_parallel: 2, directives: GPipe}\nmodel: {arguments: {preset: tiny}}")
    assert simulate(Job.of(config).plan()).bubble == pytest.approx(1 / 5)
