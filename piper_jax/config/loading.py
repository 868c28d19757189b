"""From a file and overrides to a checked configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import ValidationError

from piper_jax.config.faults import config_fault
from piper_jax.config.overrides import overridden
from piper_jax.config.schema import Config
from piper_jax.config.strategies import planned_strategy
from piper_jax.config.text import Document, parse_document
from piper_jax.config.vocabulary import BUILT_IN_MODELS, check_vocabulary, known_vocabulary
from piper_jax.errors import ConfigError, counted, suggest


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Reads a YAML file, applies ``key=value`` overrides and checks everything that needs no devices.

    A file that names no folder gives its own name to it.

    Raises:
      ConfigError: unknown keys, wrong types, values that do not fit each other; with place and suggestion.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{path}: {reason}.", help=_nearest_file(path)) from None
    config = load_config_text(text, overrides, name=str(path))
    return config if config.folder else config.model_copy(update={"folder": f"runs/{path.stem}"})


def load_config_text(text: str, overrides: Iterable[str] = (), *, name: str = "config") -> Config:
    """As :func:`load_config`, from the YAML itself."""
    document = overridden(parse_document(text, name), overrides)
    try:
        config = Config.model_validate(document.values)
    except ValidationError as error:
        raise config_fault(error, document, Config) from None
    config.strategy.locate(document)
    for check in CHECKS:
        check(config, document)
    return config


def _nearest_file(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("configs")
    known = [str(found) for found in folder.glob("*.yaml")] if folder.is_dir() else []
    return suggest(str(path), known) if known else "give the path of a YAML file."


# -- what one section alone cannot tell -------------------------------------------------------------
def _check_model(config: Config, document: Document) -> None:
    name, at = config.model.name, document.place(("model", "name"))
    if name in BUILT_IN_MODELS:
        try:
            BUILT_IN_MODELS[name](**config.model.arguments)
        except ConfigError as error:
            at = document.place(("model", "arguments", str(error.data.get("argument", "preset"))))
            raise ConfigError(f"{at}: model.arguments: {error.what}", help=error.help) from None
    elif not all(part.isidentifier() for part in name.replace(":", ".", 1).split(".")) or ":" not in name:
        raise ConfigError(
            f"{at}: there is no model {name!r}.",
            help=suggest(name, BUILT_IN_MODELS) + " Or an import path such as my_package.my_module:language_model.",
        )


def _check_tokenizer(config: Config, document: Document) -> None:
    section, at = config.data.tokenizer, document.place(("data", "tokenizer"))
    given = [name for name in ("file", "vocab_size", "end") if getattr(section, name) is not None]
    if section.kind == "bytes" and given:
        raise ConfigError(
            f"{at}: data.tokenizer: bytes have no {given[0]}.", help=f"set kind: bpe, or leave {given[0]} out."
        )
    if section.kind == "bpe" and (section.file is None) == (section.vocab_size is None):
        found = "neither file nor vocab_size" if section.file is None else "both file and vocab_size"
        raise ConfigError(
            f"{at}: data.tokenizer: bpe has {found}.", help="give a file to load, or a vocab_size to train."
        )
    if (known := known_vocabulary(config.data)) is not None:
        check_vocabulary(config, *known, at=document.place(("model", "arguments", "vocab_size")))


def _check_strategy(config: Config, document: Document) -> None:
    planned_strategy(config)


def _check_batch(config: Config, document: Document) -> None:
    strategy, size = planned_strategy(config), config.train.batch_size
    replicas = strategy.data_parallel * strategy.expert_parallel
    slices = strategy.resolved_num_microbatches * replicas
    if size % slices:
        nearest = max(round(size / slices), 1) * slices
        raise ConfigError(
            f"{document.place(('train', 'batch_size'))}: train.batch_size = {size} does not divide into "
            f"{counted(strategy.resolved_num_microbatches, 'microbatch')} x {counted(replicas, 'replica')}.",
            help=f"use a multiple of {slices}, such as {nearest}.",
        )


def _check_devices(config: Config, document: Document) -> None:
    devices, needed = config.devices, planned_strategy(config).num_devices
    if devices.num_virtual is not None and devices.platform != "cpu":
        raise ConfigError(
            f"{document.place(('devices', 'num_virtual'))}: devices.num_virtual needs devices.platform = cpu.",
            help="set devices.platform=cpu, or leave num_virtual out.",
        )
    if devices.num_virtual is not None and devices.num_virtual < needed:
        raise ConfigError(
            f"{document.place(('devices', 'num_virtual'))}: devices.num_virtual = {devices.num_virtual}, "
            f"but the strategy needs {counted(needed, 'device')}.",
            help=f"set devices.num_virtual={needed}, or lower a degree of the strategy.",
        )


def _check_optimizer(config: Config, document: Document) -> None:
    section, steps = config.optimizer, config.train.steps
    for key, (name, own) in section.foreign().items():
        at = document.place(("optimizer", key))
        has = f"{name} has {', '.join(own)}." if own else f"leave it out: {name} has no keys of its own."
        raise ConfigError(f"{at}: optimizer.{key}: {name} has no such key.", help=has)
    for key, value in (("warmup_steps", section.warmup_steps), ("accumulate_steps", section.accumulate_steps - 1)):
        if value >= steps:
            raise ConfigError(
                f"{document.place(('optimizer', key))}: optimizer.{key} = {getattr(section, key)} "
                f"leaves nothing of train.steps = {steps}.",
                help=f"use fewer, such as {max(steps // 10, 1)}.",
            )
    for index, pattern in enumerate(section.decay_paths or ()):
        try:
            re.compile(pattern)
        except re.error as error:
            at = document.place(("optimizer", "decay_paths", index))
            raise ConfigError(
                f"{at}: optimizer.decay_paths.{index}: {pattern!r} is no regular expression: {error}.",
                help=r"such as '\.kernel$'.",
            ) from None
    if config.evaluation.use_ema and section.ema_decay is None:
        raise ConfigError(
            f"{document.place(('evaluation', 'use_ema'))}: evaluation.use_ema: no average of the parameters is kept.",
            help="set optimizer.ema_decay, such as 0.999.",
        )


def _check_precision(config: Config, document: Document) -> None:
    given, compute = config.model.arguments.get("compute_dtype"), config.precision.compute
    if compute is not None and given not in (None, compute):
        raise ConfigError(
            f"{document.place(('precision', 'compute'))}: precision.compute = {compute}, "
            f"but model.arguments.compute_dtype = {given}.",
            help="leave one of them out.",
        )


def _check_profile(config: Config, document: Document) -> None:
    first, last = config.profile.steps if config.profile else (1, 1)
    if not first <= last <= config.train.steps:
        raise ConfigError(
            f"{document.place(('profile', 'steps'))}: profile.steps = [{first}, {last}] "
            f"is no window of train.steps = {config.train.steps}.",
            help="give the first and the last step of it, such as [10, 12].",
        )


CHECKS: tuple[Callable[[Config, Document], None], ...] = (
    _check_model,
    _check_tokenizer,
    _check_strategy,
    _check_batch,
    _check_devices,
    _check_optimizer,
    _check_precision,
    _check_profile,
)
