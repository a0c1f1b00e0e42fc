"""What a step takes of the device's memory while it runs.

Knows configurations and sizes; an upper bound, not a measurement: XLA decides.
"""

import jax.numpy as jnp

from punica_jax.models import MODULE_GROUPS, LlamaConfig
from punica_jax.pallas_kernels import RANK_PAGE, Implementation
from punica_jax.sizes import Sizes

# Logits, their filters' keys and weights, and random numbers, of 4 bytes each.
_ARRAYS_OF_LOGITS = 6
# Rows of a tile of the XLA form.
_TILE_ROWS = 16


def workspace_bytes(
    config: LlamaConfig, sizes: Sizes, dtype: str, implementation: Implementation
) -> int:
    """Return an upper bound of what the greatest step takes beside its arguments.

    The kernels need the rows' activations. The XLA form also gathers the adapters of
    every tile of rows, and in a decode step the keys and values of every sequence.

    Args:
      config: the model's.
      sizes: rows, sequences and ranks.
      dtype: of the weights.
      implementation: what runs.
    """
    groups = [(name, config.d_in(name), config.d_outs(name)) for name in MODULE_GROUPS]
    widths = sum(d_in + sum(d_outs) for _, d_in, d_outs in groups)
    activations = 4 * sizes.max_rows * widths
    logits = 4 * _ARRAYS_OF_LOGITS * sizes.max_seats * config.vocab_size
    if implementation != "xla":
        return activations + logits
    slots = min(sizes.max_rows, sizes.num_device_slots + 1)
    num_tiles = slots + (sizes.max_rows - slots) // _TILE_ROWS
    pages = sum(len(d_outs) * d_in + sum(d_outs) for _, d_in, d_outs in groups)
    ranks = num_tiles * sizes.pages_per_adapter * RANK_PAGE
    itemsize = jnp.dtype(dtype).itemsize
    # Once as they are, and once selected; XLA may widen that to float32.
    gathered = ranks * pages * (itemsize + 4)
    cached = sizes.num_kv_pages * sizes.page_size
    cached *= config.num_kv_heads * config.head_dim
    widened = 0
    if itemsize < 4:
        # One layer's keys and values, which it may widen before they are gathered, and
        # the widest product, which may be there as float32 while it is rounded.
        widest = max(sum(d_outs) for _, _, d_outs in groups)
        widened = 2 * 4 * cached + (4 + itemsize) * sizes.max_rows * widest
    tokens = sizes.max_seats * sizes.pages_per_seq * sizes.page_size
    # Keys, values, and each once more with what is no token taken out; and scores.
    attended = 4 * tokens * (4 * config.num_kv_heads * config.head_dim)
    attended += 4 * tokens * 3 * config.num_heads
    return activations + logits + widened + max(gathered, attended)
