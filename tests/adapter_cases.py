"""The small base model of the adapter tests, and ways to write adapters for it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from punica_jax.models import write_page
from punica_jax.models._config import LlamaConfig

# All widths differ (q 32, kv 16, hidden 24, mlp 40), so a mixed-up axis fails.
CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
# What tests/make_peft_golden.py gave to transformers.
GOLDEN_CONFIG = LlamaConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=16,
    num_layers=12,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)
WIDTHS = {  # module -> (d_in, d_out) under CONFIG
    "self_attn.q_proj": (24, 32),
    "self_attn.k_proj": (24, 16),
    "self_attn.v_proj": (24, 16),
    "self_attn.o_proj": (32, 24),
    "mlp.gate_proj": (24, 40),
    "mlp.up_proj": (24, 40),
    "mlp.down_proj": (40, 24),
}

Ranks = Mapping[tuple[int, str], int]
Factors = dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]


def random_factors(ranks: Ranks, seed: int = 0) -> Factors:
    """Return (layer, module) -> (A, B) in float32, of about unit variance."""
    rng = np.random.default_rng(seed)
    factors: Factors = {}
    for (layer, module), rank in ranks.items():
        d_in, d_out = WIDTHS[module]
        a = rng.standard_normal((rank, d_in)) / np.sqrt(d_in)
        b = rng.standard_normal((d_out, rank)) / np.sqrt(rank)
        factors[layer, module] = a.astype(np.float32), b.astype(np.float32)
    return factors


def q_and_v(rank: int = 4) -> Factors:
    """Return an ordinary adapter: q and v in every layer."""
    modules = ("self_attn.q_proj", "self_attn.v_proj")
    return random_factors(
        {(layer, m): rank for layer in range(CONFIG.num_layers) for m in modules}
    )


def peft_names(factors: Factors) -> dict[str, np.ndarray]:
    """Return the tensors under the names that PEFT gives them."""
    return {
        f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight": array
        for (layer, module), pair in factors.items()
        for half, array in zip("AB", pair, strict=True)
    }


def write_peft(
    path: Path, tensors: Mapping[str, np.ndarray] | None = None, **fields: Any
) -> Path:
    """Write a PEFT directory without any check: q_and_v, with whatever is changed."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = peft_names(q_and_v()) if tensors is None else tensors
    fields = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        **fields,
    }
    (path / "adapter_config.json").write_text(json.dumps(fields))
    save_file(dict(tensors), path / "adapter_model.safetensors")
    return path


def in_pools(adapter, group, index, config=CONFIG):
    """Return a page's A, and its B `[layers, 16, d_out_total]`, as pools have them."""
    a_page, b_page, scale = adapter.page(group, index)
    scales = np.repeat(scale, config.d_outs(group), axis=1)[:, :, None]
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (b_page.astype(np.float32) * scales).astype(b_page.dtype)
    return a_page, scaled.transpose(0, 2, 1)


def write_pages(pools, adapter, pages, write=write_page):
    """Write an adapter to its pages: group -> their numbers, in rank order."""
    for group, numbers in pages.items():
        for index, page in enumerate(numbers):
            arrays = adapter.page(group, index)
            pools, finite = write(pools, group, np.int32(page), *arrays)
            assert finite
    return pools
