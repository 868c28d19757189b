"""Configurations: typed, strict, read from YAML with ``key=value`` overrides. Imports no JAX."""

from piper_jax.config.data import DataSection, TokenizerSection
from piper_jax.config.differences import Difference, differing_keys
from piper_jax.config.loading import load_config, load_config_text
from piper_jax.config.optimizer import OptimizerSection
from piper_jax.config.schema import (
    CheckpointSection,
    Config,
    DevicesSection,
    DirectiveSection,
    EvaluationSection,
    FaultMoment,
    FaultSection,
    LoggingSection,
    ModelSection,
    PrecisionSection,
    ProfileSection,
    StrategySection,
    TrainSection,
    WandbSection,
)
from piper_jax.config.strategies import planned_strategy
from piper_jax.config.text import config_text
from piper_jax.config.vocabulary import check_vocabulary, known_vocabulary

__all__ = [
    "CheckpointSection",
    "Config",
    "DataSection",
    "DevicesSection",
    "Difference",
    "DirectiveSection",
    "EvaluationSection",
    "FaultMoment",
    "FaultSection",
    "LoggingSection",
    "ModelSection",
    "OptimizerSection",
    "PrecisionSection",
    "ProfileSection",
    "StrategySection",
    "TokenizerSection",
    "TrainSection",
    "WandbSection",
    "check_vocabulary",
    "config_text",
    "differing_keys",
    "known_vocabulary",
    "load_config",
    "load_config_text",
    "planned_strategy",
]
