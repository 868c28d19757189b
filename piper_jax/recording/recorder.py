"""Everything that a run writes about its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from piper_jax.config import Config
from piper_jax.recording.base import Facts, Sink
from piper_jax.recording.folder import RunFolder
from piper_jax.recording.json_lines import JsonLines


class Recorder:
    """Hands on to its sinks; one without any, as in all processes but the first, does nothing."""

    def __init__(self, sinks: Sequence[Sink] = ()):
        self._sinks = tuple(sinks)

    @classmethod
    def open(cls, config: Config, folder: RunFolder, *, after: int = 0) -> Recorder:
        """JSON lines, TensorBoard, and Weights & Biases where the configuration asks for it.

        Args:
          after: the step that the run goes on from; nothing of later ones, from before, stays.

        Raises:
          ConfigError: wandb is not installed.
        """
        from piper_jax.recording.tensorboard import TensorBoard
        from piper_jax.recording.weights_and_biases import WeightsAndBiases

        sinks: list[Sink] = [JsonLines(folder.metrics, after=after), TensorBoard(folder.tensorboard, after=after)]
        if config.logging.wandb is not None:
            sinks.append(WeightsAndBiases(config.logging.wandb, config, folder))
        return cls(sinks)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step, by name."""
        for sink in self._sinks:
            sink.record(step, values)

    def say(self, step: int, facts: Facts) -> None:
        """What holds from this step on."""
        for sink in self._sinks:
            sink.say(step, facts)

    def flush(self) -> None:
        """Everything so far is in files afterwards; to be called before a checkpoint counts as saved."""
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
