"""Models that are no chain of layers. Each of their blocks is a region, or none is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tiny_models import DIM, VOCAB, Block, cross_entropy, tokens

import piper_jax as piper


class Shape(nnx.Module):
    """Blocks that are entered by ``self.unit(block, ...)``."""

    def __init__(self, num_blocks: int, *, regions: bool):
        self.regions, rngs = regions, nnx.Rngs(0)
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.blocks = nnx.List([Block(DIM, rngs=rngs) for _ in range(num_blocks)])
        self.mix = nnx.List([nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(num_blocks)])
        self.head = nnx.Linear(DIM, VOCAB, use_bias=False, rngs=rngs)

    def unit(self, k: int, x: Any, other: Any = None, mix: Callable[[Any, Any], Any] = jnp.add) -> Any:
        """Block ``k`` of ``x``, and of what ``mix`` makes of it and the projected other value."""
        with piper.annotate("PP") if self.regions else nullcontext():
            return self.blocks[k](mix(x, self.mix[k](x if other is None else other)))


class EncoderDecoder(Shape):
    """Two encoder blocks; two decoder blocks, each of which attends to what the encoder gave."""

    def __init__(self, *, regions: bool = True):
        super().__init__(4, regions=regions)

    def __call__(self, batch: Any) -> Any:
        memory, x = self.embed(batch["source"]), self.embed(batch["x"])
        for k in (0, 1):
            memory = self.unit(k, memory)
        for k in (2, 3):
            x = self.unit(k, x, memory, _attended)
        return cross_entropy(self.head(x), batch["y"]).mean()


def _attended(x: Any, memory: Any) -> Any:
    return x + jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x, memory)) @ memory


class TwoTowers(Shape):
    """Two towers of two blocks, which meet in a contrastive loss over the rows of a slice.

    Args:
      interleaved: their blocks are entered in turn, and not one tower after the other.
      frozen: no gradient goes into the first tower.
    """

    def __init__(self, *, interleaved: bool = False, frozen: bool = False, regions: bool = True):
        super().__init__(4, regions=regions)
        self.turns = (0, 2, 1, 3) if interleaved else (0, 1, 2, 3)
        self.frozen = frozen

    def __call__(self, batch: Any) -> Any:
        ends = [self.embed(batch["source"]), self.embed(batch["x"])]
        for k in self.turns:
            ends[k // 2] = self.unit(k, ends[k // 2])
        left, right = (jnp.tanh(end.mean(axis=1)) for end in ends)
        left = jax.lax.stop_gradient(left) if self.frozen else left
        return cross_entropy(left @ right.T, jnp.arange(len(left))).mean()


class UNet(Shape):
    """Blocks on the way up read what the blocks on the way down gave, the first one last."""

    def __init__(self, *, regions: bool = True):
        super().__init__(5, regions=regions)

    def __call__(self, batch: Any) -> Any:
        x, skips = self.embed(batch["x"]), []
        for k in (0, 1):
            skips.append(x := self.unit(k, x))
        x = self.unit(2, x)
        for k in (3, 4):
            x = self.unit(k, x, skips.pop())
        return cross_entropy(self.head(x), batch["y"]).mean()


def shape_loss(model: Shape, batch: Any) -> Any:
    return model(batch)


def pairs(rows: int) -> dict[str, np.ndarray]:
    """Batches of tokens with a second input, ``source``."""
    return {**tokens(rows), "source": tokens(rows, seed=1)["x"]}
