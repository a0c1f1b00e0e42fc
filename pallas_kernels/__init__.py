"""Operations on arrays: segmented LoRA products, paged attention, filters' limits.

Knows nothing of models, files or requests.
"""

from punica_jax.pallas_kernels._digit_buckets import order_keys
from punica_jax.pallas_kernels._dispatch import Implementation, resolve
from punica_jax.pallas_kernels._epilogues import (
    lora_gated,
    lora_linear,
    lora_normed,
)
from punica_jax.pallas_kernels._norm import Norm, NormedRows, divided, rms_norm
from punica_jax.pallas_kernels._operands import as_array, as_slots, require_count
from punica_jax.pallas_kernels._ops import expand, lora, segment_metadata, shrink
from punica_jax.pallas_kernels._paged_attention import paged_attention
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool, pack_adapters
from punica_jax.pallas_kernels._rotary import lora_attention, lora_rotary
from punica_jax.pallas_kernels._segments import Segments
from punica_jax.pallas_kernels._sgmv_config import MAX_PROJECT_ROWS
from punica_jax.pallas_kernels._thresholds import kth_largest, nucleus

__all__ = [
    "MAX_PROJECT_ROWS",
    "RANK_PAGE",
    "Implementation",
    "LoraPool",
    "Norm",
    "NormedRows",
    "Segments",
    "as_array",
    "as_slots",
    "divided",
    "expand",
    "kth_largest",
    "lora",
    "lora_attention",
    "lora_gated",
    "lora_linear",
    "lora_normed",
    "lora_rotary",
    "nucleus",
    "order_keys",
    "pack_adapters",
    "paged_attention",
    "require_count",
    "resolve",
    "rms_norm",
    "segment_metadata",
    "shrink",
]
