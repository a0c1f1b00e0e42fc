"""One forward and one sampling: what a step is, for every caller.

Pure; knows a batch's arrays, the model, the cache and the pools. Knows nothing of how
steps follow each other.
"""

import jax.numpy as jnp
from jax import Array

from punica_jax.batch import Batch
from punica_jax.models import CachedAttention, KvCache, Llama, LoraPools
from punica_jax.pallas_kernels import segment_metadata
from punica_jax.sampling import sample


def run_step(
    model: Llama,
    cache: KvCache,
    pools: LoraPools | None,
    batch: Batch,
    *,
    implementation: str | None = None,
) -> tuple[Array, KvCache]:
    """Run the decoder on a batch and choose each sequence's next token.

    Args:
      model: the base model.
      cache: keys and values before the step; donate it.
      pools: the loaded adapters, or None.
      batch: the rows; arrays may be traced.
      implementation: see `pallas_kernels.resolve`.

    Returns:
      `i32[seqs]`, the next token of each sequence (meaningless for idle ones), and
      the cache with the rows' keys and values.
    """
    rows = batch.tokens.shape[0]
    attend = CachedAttention(
        cache, batch.seqs, rows, batch.max_query_len, implementation
    )
    segments = None
    if pools is not None:
        segments = segment_metadata(
            jnp.asarray(batch.slots),
            num_slots=pools.num_slots,
            implementation=implementation,
        )
    hidden = model(
        jnp.asarray(batch.tokens),
        batch.seqs.positions(rows),
        attend,
        pools,
        segments,
        implementation=implementation,
    )
    logits = model.logits(hidden[batch.logit_rows])
    # The generated token's own position: all of the sequence comes before it.
    tokens = sample(
        logits,
        jnp.asarray(batch.temperature),
        jnp.asarray(batch.seeds),
        jnp.asarray(batch.seqs.kv_lens),
    )
    return tokens, attend.cache
