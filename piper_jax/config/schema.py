"""What a configuration may say: one frozen model per section. Unknown keys and wrong types are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr
from pydantic_core import PydanticCustomError

from piper_jax.config.data import DataSection
from piper_jax.config.optimizer import OptimizerSection
from piper_jax.config.section import Count, Number, Section, several
from piper_jax.config.text import Document


def _directive(value: object) -> object:
    """``1F1B`` for ``{name: 1F1B}``; keys other than name are the options."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict) and "options" not in value:
        return {"name": value.get("name"), "options": {k: v for k, v in value.items() if k != "name"}}
    return value


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


class DirectiveSection(Section):
    """A named strategy with its options."""

    name: str
    options: dict[str, Any] = {}


class StrategySection(Section):
    """How a step is spread over devices; see ``piper.Strategy``. It knows where it was written, for messages.

    Attributes:
      stages: the module paths of each stage, such as ``["embed, layers.0-2", "layers.3-5"]``; null: cut by cost.
      memory_limit: bytes that each device may hold by the simulator's count; automatic stages are cut so that they fit.
      directives: names, or mappings of a name and options.
      files: Python files with ``@piper.strategy`` functions of your own.
    """

    data_parallel: Count = 1
    pipeline_parallel: Count = 1
    expert_parallel: Count = 1
    tensor_parallel: Count = 1
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    num_microbatches: Count | None = None
    stages: Annotated[tuple[str, ...] | None, BeforeValidator(several)] = None
    memory_limit: Count | None = None
    directives: Annotated[
        tuple[Annotated[DirectiveSection, BeforeValidator(_directive)], ...], BeforeValidator(several)
    ] = ()
    files: Annotated[tuple[str, ...], BeforeValidator(several)] = ()
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


class TrainSection(Section):
    """How long, and on how much at a time.

    Attributes:
      batch_size: sequences per step, over all devices.
      sequence_length: tokens per sequence.
      seed: of initial parameters, batches and dropout.
      on_nonfinite: what a loss or gradient that is not finite means; the step changes nothing in any case. ``abort``
        ends the run, ``skip`` goes on with the next batch.
      max_skipped: steps in a row that ``skip`` bears.
      log_every: steps between printed lines where the output is no terminal.
    """

    steps: Count = 100
    batch_size: Count = 32
    sequence_length: Count = 128
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    on_nonfinite: Literal["abort", "skip"] = "abort"
    max_skipped: Count = 3
    log_every: Count = 10


class EvaluationSection(Section):
    """Evaluation on held-out text, always after the last step.

    Attributes:
      every: steps between evaluations in between; 0 means none.
      num_batches: of the training batch size.
      use_ema: evaluate the average of the parameters that ``optimizer.ema_decay`` keeps.
    """

    every: Annotated[int, Field(ge=0)] = 0
    num_batches: Count = 8
    use_ema: bool = False


class DevicesSection(Section):
    """Where to run.

    Attributes:
      platform: None means whatever JAX finds.
      num_virtual: makes one CPU look like this many devices, or, with several processes, all of them together; only
        with platform ``cpu``.
    """

    platform: Literal["cpu", "cuda", "rocm", "tpu"] | None = None
    num_virtual: Count | None = None


class PrecisionSection(Section):
    """Number formats; parameters, gradients and optimizer state stay in the model's ``param_dtype``, float32.

    Attributes:
      compute: of activations and matrix products; null: as the model's arguments say.
    """

    compute: Literal["float32", "bfloat16"] | None = None


class WandbSection(Section):
    """Weights & Biases; needs the extra ``wandb``.

    Attributes:
      project, entity, name: as for ``wandb.init``.
    """

    project: Annotated[str, Field(min_length=1)]
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] = "online"


class LoggingSection(Section):
    """Where metrics go beside ``metrics.jsonl`` and ``tensorboard/`` in the run's folder.

    Attributes:
      peak_flops: floating-point operations per second of one device, for the MFU; null: that of the profile of the
        hardware, if its kind has one.
    """

    peak_flops: Annotated[Number, Field(gt=0)] | None = None
    wandb: WandbSection | None = None


class ProfileSection(Section):
    """A window of steps that is looked at closely.

    Attributes:
      steps: the first and the last step, from 1. The first is measured node by node, beside the plan
        (``piper-profile.html``, and ``.json`` for Perfetto); all of them are traced by JAX's profiler.
    """

    steps: Annotated[tuple[Count, Count], BeforeValidator(several)]


def _window(value: object) -> object:
    if value is True:
        raise PydanticCustomError("window", "a window of steps such as profile.steps=[10,12]")
    return None if value is False else value


class ProcessesSection(Section):
    """Several processes that run the plan together; limits are in seconds.

    Attributes:
      join: whether this process is one of several: ``auto`` where ``piper launch``, the three variables
        JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or a cluster that JAX knows say so.
      start_limit: until all processes have come.
      compile_limit: until all have compiled.
      step_limit: that they may stay at the same place of a step, or wait for data.
      lost_limit: without a sign of life of a process.
    """

    join: Literal["auto", "never"] = "auto"
    start_limit: Annotated[Number, Field(gt=0)] = 300.0
    compile_limit: Annotated[Number, Field(gt=0)] = 1800.0
    step_limit: Annotated[Number, Field(gt=0)] = 600.0
    lost_limit: Annotated[Number, Field(gt=0)] = 60.0


class CheckpointSection(Section):
    """What is saved, into ``checkpoints`` in the folder of the run; the same command goes on from the newest step.

    Attributes:
      every: steps between checkpoints, the last step is one in any case; 0: none, and each run begins anew.
      keep: the newest that are kept; null: all.
      keep_every: multiples of this many steps are kept besides; null: none.
      on_failure: of a save: ``fail`` ends the run, ``continue`` goes on with the checkpoints before.
      on_corrupt: what a damaged newest step means: ``fail`` ends the run, ``previous`` takes the one before.
      accept_changes: go on although keys that the result depends on have changed.
    """

    every: Annotated[int, Field(ge=0)] = 100
    keep: Count | None = 3
    keep_every: Count | None = None
    on_failure: Literal["fail", "continue"] = "fail"
    on_corrupt: Literal["fail", "previous"] = "fail"
    accept_changes: bool = False


FaultMoment = Literal["compile", "data", "step", "evaluation", "save"]


class FaultSection(Section):
    """A fault that is to happen, to try out how a run bears it.

    Attributes:
      step: the number of the step.
      moment: in it: while compiling before it, waiting for its batch, after it was dispatched, in the evaluation or
        while saving after it.
      kind: ``kill``, ``term`` and ``int`` are signals; ``hang`` waits forever; ``disk_full`` lets the save fail, and
        ``nan`` makes the loss of the step's last microbatch NaN, whatever the moment.
      process: of several, the one that it happens to; a batch and a disk are those of all, or of the first.
    """

    step: Annotated[int, Field(ge=0)]
    moment: FaultMoment = "step"
    kind: Literal["kill", "term", "int", "hang", "disk_full", "nan"]
    process: Annotated[int, Field(ge=0)] = 0


class Config(Section):
    """A whole training run.

    Attributes:
      folder: what the run leaves behind; null: ``runs/`` and the name of the file without its suffix.
    """

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    strategy: StrategySection = StrategySection()
    optimizer: OptimizerSection = OptimizerSection()
    train: TrainSection = TrainSection()
    evaluation: EvaluationSection = EvaluationSection()
    devices: DevicesSection = DevicesSection()
    precision: PrecisionSection = PrecisionSection()
    logging: LoggingSection = LoggingSection()
    processes: ProcessesSection = ProcessesSection()

    checkpoint: CheckpointSection = CheckpointSection()
    faults: Annotated[tuple[FaultSection, ...], BeforeValidator(several)] = ()
    folder: Annotated[str, Field(min_length=1)] | None = None
    profile: Annotated[ProfileSection | None, BeforeValidator(_window)] = None
