"""A configuration as things that can be traced and run: model, optimizer, strategy, batch shapes."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

import piper_jax as piper
from piper_jax.config import Config, ModelSection, planned_strategy
from piper_jax.data import batch_names
from piper_jax.errors import ConfigError, PiperError, RuntimeFault, counted, suggest
from piper_jax.models.language_model import LanguageModel
from piper_jax.optimizers import build_optimizer
from piper_jax.train.injection import poison_shapes, poisonable

BUILT_IN_MODELS = {
    "gpt": "piper_jax.models.gpt:language_model",
    "gpt_linen": "piper_jax.models.gpt_linen:language_model",
    "moe": "piper_jax.models.moe:language_model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a training run consists of; nothing is on a device yet."""

    config: Config
    model: LanguageModel
    optimizer: optax.GradientTransformation
    strategy: piper.Strategy

    @classmethod
    def of(cls, config: Config) -> Job:
        """Imports the model and builds the rest.

        Raises:
          ConfigError: the model cannot be imported or does not take these arguments.
        """
        return cls(
            config=config,
            model=poisonable(build_model(config.model, config.precision.compute), config.faults),
            optimizer=build_optimizer(config.optimizer, config.train.steps),
            strategy=planned_strategy(config),
        )

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The batch of one step, int32 ``[batch, length]`` each: tokens and targets, and what packing adds."""
        shape = (self.config.train.batch_size, self.config.train.sequence_length)
        tokens = {name: jax.ShapeDtypeStruct(shape, np.int32) for name in batch_names(self.config.data)}
        return {**tokens, **poison_shapes(shape[0], self.config.faults)}

    def plan(self) -> piper.Plan:
        """Traces the model and applies the strategy; no device is touched."""
        traced = piper.trace(self.model.loss_fn, self.model.shapes(), self.batch_shapes(), optimizer=self.optimizer)
        return traced.apply(self.strategy)

    def parameters(self) -> Any:
        """Initial parameters, from the seed."""
        return self.model.init(jax.random.key(self.config.train.seed))

    def device_map(self, plan: piper.Plan) -> piper.DeviceMap:
        """The best placement of a plan of this job on JAX's devices.

        Raises:
          RuntimeFault: there are fewer.
        """
        needed, found = self.strategy.num_devices, jax.devices()
        if len(found) < needed:
            raise RuntimeFault(
                f"the strategy needs {counted(needed, 'device')}; JAX finds {len(found)} ({found[0].platform}).",
                help=f"lower a degree, or set devices.platform=cpu devices.num_virtual={needed} to try it on one CPU.",
            )
        return piper.DeviceMap.of(plan, found)


def build_model(section: ModelSection, compute_dtype: str | None = None) -> LanguageModel:
    """Imports and calls the function that ``model.name`` names.

    Args:
      compute_dtype: one more argument of it, where it is not None.

    Raises:
      ConfigError: no such module or function, arguments that it does not take, or another kind of result.
    """
    path = BUILT_IN_MODELS.get(section.name, section.name)
    function = _imported(path)
    arguments = section.arguments if compute_dtype is None else {**section.arguments, "compute_dtype": compute_dtype}
    try:
        model = function(**arguments)
    except PiperError:
        raise
    except TypeError as error:
        raise ConfigError(f"model.arguments: {path}: {error}.", help="give the arguments that it takes.") from error
    if not isinstance(model, LanguageModel):
        raise ConfigError(
            f"model.name: {path} returns a {type(model).__name__}.",
            help="return a piper_jax.models.language_model.LanguageModel(init=..., loss_fn=...).",
        )
    return model


def _imported(path: str) -> Any:
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"model.name: {module_name} cannot be imported: {error}.",
            help="install it, or add its folder to PYTHONPATH.",
        ) from error
    if not callable(getattr(module, name, None)):
        functions = [known for known in dir(module) if callable(getattr(module, known)) and not known.startswith("_")]
        raise ConfigError(f"model.name: {module_name} has no function {name!r}.", help=suggest(name, functions))
    return getattr(module, name)
