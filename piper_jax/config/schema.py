"""What a configuration may say: one frozen model per section. Unknown keys and wrong types are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from piper_jax.config.text import Document

Count = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]


def _tuple(value: object) -> object:
    """YAML has lists; a single item may stand for a list of one."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, (str, dict)) else value


def _directive(value: object) -> object:
    """``1F1B`` for ``{name: 1F1B}``; keys other than name are the options."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict) and "options" not in value:
        return {"name": value.get("name"), "options": {k: v for k, v in value.items() if k != "name"}}
    return value


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


class ModelSection(Section):
    """Which model.

    Attributes:
      name: ``gpt``, ``gpt_linen``, ``moe``, or ``package.module:function`` that returns a
        ``piper_jax.models.language_model.LanguageModel``.
      arguments: its keyword arguments; for the GPTs those of ``gpt_config``, for ``moe`` those of ``moe_config``,
        ``preset`` included.
    """

    name: str = "gpt"
    arguments: dict[str, Any] = {}


class DataSection(Section):
    """Which text.

    Attributes:
      paths: files or globs (``**`` for any depth); none means the Python standard library's own sources.
      held_out_fraction: the part that is only evaluated on.
      max_bytes: read no more than this many bytes; None means all.
    """

    paths: Annotated[tuple[str, ...], BeforeValidator(_tuple)] = ()
    held_out_fraction: Annotated[Number, Field(gt=0, le=0.5)] = 0.05
    max_bytes: Count | None = None


class DirectiveSection(Section):
    """A named strategy with its options."""

    name: str
    options: dict[str, Any] = {}


class StrategySection(Section):
    """How a step is spread over devices; see ``piper.Strategy``. It knows where it was written, for messages.

    Attributes:
      stages: the module paths of each stage, such as ``["embed, layers.0-2", "layers.3-5"]``; null: cut by cost.
      directives: names, or mappings of a name and options.
      files: Python files with ``@piper.strategy`` functions of your own.
    """

    data_parallel: Count = 1
    pipeline_parallel: Count = 1
    expert_parallel: Count = 1
    tensor_parallel: Count = 1
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    num_microbatches: Count | None = None
    stages: Annotated[tuple[str, ...] | None, BeforeValidator(_tuple)] = None
    directives: Annotated[
        tuple[Annotated[DirectiveSection, BeforeValidator(_directive)], ...], BeforeValidator(_tuple)
    ] = ()
    files: Annotated[tuple[str, ...], BeforeValidator(_tuple)] = ()
    _document: Document | None = PrivateAttr(default=None)

    def locate(self, document: Document) -> None:
        """Remembers the document that it was read from."""
        self._document = document

    def place(self, *path: str | int) -> str:
        """Where a key of it was written: ``run.yaml:12``, or the override."""
        return "strategy" if self._document is None else self._document.place(("strategy", *path))

    def __eq__(self, other: object) -> bool:
        """Where it was written is no part of the value."""
        return isinstance(other, StrategySection) and self.model_dump() == other.model_dump()


class OptimizerSection(Section):
    """Adam with decoupled weight decay, linear warm-up and cosine decay.

    Attributes:
      learning_rate: at its peak.
      warmup_steps: from 0 to the peak.
      final_fraction: the last step's rate as a part of the peak.
      weight_decay: of matrices only, not of vectors.
      clip_norm: bound of the global gradient norm; None means no clipping.
    """

    name: Literal["adamw"] = "adamw"
    learning_rate: Annotated[Number, Field(gt=0)] = 3e-4
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    final_fraction: Annotated[Number, Field(ge=0, le=1)] = 0.1
    b1: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    b2: Annotated[Number, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[Number, Field(gt=0)] = 1e-8
    weight_decay: Annotated[Number, Field(ge=0)] = 0.1
    clip_norm: Annotated[Number, Field(gt=0)] | None = 1.0


class TrainSection(Section):
    """How long, and on how much at a time.

    Attributes:
      batch_size: sequences per step, over all devices.
      sequence_length: bytes per sequence.
      seed: of initial parameters, batches and dropout.
      log_every: steps between printed lines where the output is no terminal.
    """

    steps: Count = 100
    batch_size: Count = 32
    sequence_length: Count = 128
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    log_every: Count = 10


class EvaluationSection(Section):
    """Evaluation on held-out text, always after the last step.

    Attributes:
      every: steps between evaluations in between; 0 means none.
      num_batches: of the training batch size.
    """

    every: Annotated[int, Field(ge=0)] = 0
    num_batches: Count = 8


class DevicesSection(Section):
    """Where to run.

    Attributes:
      platform: None means whatever JAX finds.
      num_virtual: makes one CPU look like this many devices; only with platform ``cpu``.
    """

    platform: Literal["cpu", "cuda", "rocm", "tpu"] | None = None
    num_virtual: Count | None = None


class Config(Section):
    """A whole training run.

    Attributes:
      folder: what the run leaves behind; null: ``runs/`` and the name of the file without its suffix.
      profile: after training, measure one more step and write its timeline beside the planned one, as
        ``piper-profile.html`` and, for Perfetto, ``piper-profile.json``.
    """

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    strategy: StrategySection = StrategySection()
    optimizer: OptimizerSection = OptimizerSection()
    train: TrainSection = TrainSection()
    evaluation: EvaluationSection = EvaluationSection()
    devices: DevicesSection = DevicesSection()
    folder: Annotated[str, Field(min_length=1)] | None = None
    profile: bool = False
