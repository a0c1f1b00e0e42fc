"""One forward: what a step is, for every caller.

Pure; knows a batch's arrays, the model, the cache and the pools. Knows nothing of how
steps follow each other, nor of how tokens are drawn.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from punica_jax.batch import Batch
from punica_jax.models import CachedAttention, KvCache, Llama, LoraPools
from punica_jax.pallas_kernels import segment_metadata
from punica_jax.sampling import most_likely


class StepResult(NamedTuple):
    """What a forward gives.

    Attributes:
      likely: `i32[seqs]`, the most likely next token of each sequence, meaningless
        for idle ones.
      logits: `f32[seqs, vocab]`, the model's own.
      hidden: `[rows, hidden]`, after the last normalisation.
      cache: with the rows' keys and values.
    """

    likely: Array
    logits: Array
    hidden: Array
    cache: KvCache


def run_step(
    model: Llama,
    cache: KvCache,
    pools: LoraPools | None,
    batch: Batch,
    *,
    implementation: str | None = None,
) -> StepResult:
    """Run the decoder on a batch, up to each sequence's logits.

    Args:
      model: the base model.
      cache: keys and values before the step; donate it.
      pools: the loaded adapters, or None.
      batch: the rows; arrays may be traced.
      implementation: see `pallas_kernels.resolve`.
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
    return StepResult(most_likely(logits), logits, hidden, attend.cache)
