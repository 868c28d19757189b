"""Models of packages from PyPI, with random weights at tiny sizes. What each needed is in docs/using-your-model.md."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from oracle import Problem
from tiny_models import cross_entropy

import piper_jax as piper

VOCAB, CLASSES, ROWS = 11, 5, 8
KEYS = ("key", "k_proj")
PART = {"layers": 2, "attention_heads": 2, "ffn_dim": 8}


def text(length: int = 4) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(0).integers(1, VOCAB, (ROWS, length + 1), dtype=np.int32)
    return {"x": drawn[:, :-1], "y": drawn[:, 1:]}


def images(*shape: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(ROWS, *shape)).astype(np.float32), "y": random.integers(0, CLASSES, ROWS)}


def louder(params: Any) -> Any:
    """Kernels of four times the usual, so that what models of this size give is far from uniform."""
    return jax.tree.map(lambda v: 4 * v if v.ndim > 1 else v, params)


def without_key_biases(params: Any) -> Any:
    """The same, with the biases of keys frozen: softmax takes them out, and their gradients are rounding alone."""

    def leaf(path: Any, value: Any) -> Any:
        names = [str(getattr(part, "key", part)) for part in path]
        return jax.lax.stop_gradient(value) if names[-1] == "bias" and names[-2] in KEYS else value

    return jax.tree_util.tree_map_with_path(leaf, params)


# -- NNX --------------------------------------------------------------------------------------------------
def mamba2() -> Problem:
    """mamba2-jax: a language model of state spaces, which scans over chunks of the text."""
    mamba2_jax = pytest.importorskip("mamba2_jax")
    sizes = {"hidden_size": 8, "state_size": 4, "head_dim": 8, "chunk_size": 2, "num_hidden_layers": 2}
    model = mamba2_jax.Mamba2ForCausalLM(mamba2_jax.Mamba2Config(vocab_size=VOCAB, **sizes), rngs=nnx.Rngs(0))

    def loss_fn(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch["x"])["logits"], batch["y"]).mean()

    return Problem(loss_fn=loss_fn, params=model, batch=text(), steps=2)


# -- Linen ------------------------------------------------------------------------------------------------
def nano_moe() -> Problem:
    """nano-moe-jax: a language model of experts, with dropout and an auxiliary loss."""
    nano_moe = pytest.importorskip("nano_moe")
    sizes = {"n_layers": 2, "n_heads": 1, "d_model": 8, "d_ff": 8, "n_experts": 2, "top_k": 1, "block_size": 4}
    model, batch = nano_moe.NanoMoE(nano_moe.NanoMoEConfig(vocab_size=VOCAB, **sizes)), text()

    def loss_fn(variables: Any, batch: Any, rng: Any) -> Any:
        logits, balance = model.apply(variables, batch["x"], deterministic=False, rngs={"dropout": rng})
        return cross_entropy(logits, batch["y"]).mean() + 0.01 * balance

    return Problem(loss_fn=loss_fn, params=louder(model.init(jax.random.key(0), batch["x"])), batch=batch, steps=2)


def gpt2() -> Problem:
    """transformers: a language model with tied embeddings and dropout."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=4, n_embd=8, n_layer=2, n_head=2)
    model = transformers.FlaxGPT2LMHeadModel(config)

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        logits = model(batch["x"], params=params, dropout_rng=rng, train=True).logits
        return cross_entropy(logits, batch["y"]).mean()

    return Problem(loss_fn=loss_fn, params=louder(model.params), batch=text(), steps=2)


def bart() -> Problem:
    """transformers: an encoder, and a decoder that attends to it in every layer."""
    transformers = pytest.importorskip("transformers")
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in PART.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.BartConfig(
        vocab_size=VOCAB, max_position_embeddings=8, d_model=8, forced_eos_token_id=None, **sizes, **tokens
    )
    model = transformers.FlaxBartForConditionalGeneration(config)

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        call = {"params": without_key_biases(params), "dropout_rng": rng, "train": True}
        logits = model(batch["source"], decoder_input_ids=batch["x"], **call).logits
        return cross_entropy(logits, batch["y"]).mean()

    return Problem(loss_fn=loss_fn, params=louder(model.params), batch={**text(), "source": text(3)["x"]}, steps=2)


def vit() -> Problem:
    """transformers: a vision transformer."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=CLASSES, **sizes)
    model = transformers.FlaxViTForImageClassification(config)

    def loss_fn(params: Any, batch: Any) -> Any:
        return cross_entropy(model(batch["x"], params=without_key_biases(params)).logits, batch["y"]).mean()

    return Problem(loss_fn=loss_fn, params=louder(model.params), batch=images(3, 8, 8), steps=2)


def resnet() -> Problem:
    """transformers: convolutions with BatchNorm, whose statistics are carried."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=CLASSES
    )
    model = transformers.FlaxResNetForImageClassification(config, input_shape=(1, 16, 16, 3))

    def loss_fn(variables: Any, batch: Any) -> Any:
        output, updated = model(batch["x"], params=variables, train=True)
        return cross_entropy(output.logits, batch["y"]).mean(), {"state": piper.Carried(updated)}

    return Problem(loss_fn=loss_fn, params=model.params, batch=images(3, 16, 16), steps=2)
