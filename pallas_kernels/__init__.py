"""Operations on arrays: segmented LoRA products and paged attention.

Knows nothing of models, files or requests.
"""

from punica_jax.pallas_kernels._dispatch import Implementation, resolve
from punica_jax.pallas_kernels._epilogues import lora_gated, lora_rotary
from punica_jax.pallas_kernels._ops import expand, lora, segment_metadata, shrink
from punica_jax.pallas_kernels._paged_attention import paged_attention
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool, pack_adapters
from punica_jax.pallas_kernels._segments import Segments

__all__ = [
    "RANK_PAGE",
    "Implementation",
    "LoraPool",
    "Segments",
    "expand",
    "lora",
    "lora_gated",
    "lora_rotary",
    "pack_adapters",
    "paged_attention",
    "resolve",
    "segment_metadata",
    "shrink",
]
