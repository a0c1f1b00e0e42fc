"""A random tiny Llama with a byte tokenizer and adapters, written as files."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers, processors

from punica_jax.models import (
    MODULE_GROUPS,
    Llama,
    LlamaConfig,
    save_adapter,
    save_model,
)

EOS = 257
CONFIG = LlamaConfig(
    vocab_size=264,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=128,
)
MODULES = tuple(module for group in MODULE_GROUPS.values() for module in group)


def byte_tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    return tokenizer


def write_model(path: Path, seed: int = 0) -> Path:
    """Write a model whose random weights are large enough for varied tokens.

    The norms' stay one: attention's scores would be 64 times as large, and rounding
    would be amplified until the order of a sum changes log-probabilities by 0.001.
    """
    model = Llama(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    graph, state = nnx.split(model)
    state = nnx.map_state(lambda _, leaf: leaf * 8.0 if leaf.ndim > 1 else leaf, state)
    save_model(nnx.merge(graph, state), path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    fields = {"bos_token_id": 256, "eos_token_id": [EOS]}
    (path / "generation_config.json").write_text(json.dumps(fields))
    return path


def write_adapter(path: Path, rank: int, modules=MODULES, seed: int = 0) -> Path:
    """Write an adapter that changes the model's tokens."""
    rng = np.random.default_rng(seed)
    widths = {}
    for group, names in MODULE_GROUPS.items():
        for name, d_out in zip(names, CONFIG.d_outs(group), strict=True):
            widths[name] = (CONFIG.d_in(group), d_out)
    tensors = {}
    for layer in range(CONFIG.num_layers):
        for module in modules:
            d_in, d_out = widths[module]
            a = rng.standard_normal((rank, d_in)) / np.sqrt(d_in)
            b = rng.standard_normal((d_out, rank)) / np.sqrt(rank)
            tensors[layer, module] = (a.astype(np.float32), b.astype(np.float32))
    save_adapter(path, CONFIG, tensors)
    return path
