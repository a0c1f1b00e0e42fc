"""One forward: what a step is, for every caller.

Pure; knows a batch's arrays, the model, the cache and the pools. Knows nothing of how
steps follow each other, nor of how tokens are drawn.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from punica_jax.batch import Batch
from punica_jax.models import Attended, CachedAttention, KvCache, Llama, LoraPools
from punica_jax.pallas_kernels import Segments, segment_metadata
from punica_jax.sampling import most_likely


class StepResult(NamedTuple):
    """What a forward gives.

    Attributes:
      likely: `i32[seqs]`, the most likely next token of each sequence, meaningless
        for idle ones.
      logits: `f32[seqs, vocab]`, the model's own.
      attended: all rows behind the last attention, of which `token_logits` gives the
        logits of any.
      cache: with the rows' keys and values.
    """

    likely: Array
    logits: Array
    attended: Attended
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

    Behind the last attention it goes on with the rows that have logits, one of each
    sequence: of a prompt's others nobody needs more than their keys and values.

    Args:
      model: the base model.
      cache: keys and values before the step; donate it.
      pools: the loaded adapters, or None.
      batch: the rows; arrays may be traced.
      implementation: see `pallas_kernels.resolve`.
    """
    rows, seqs, max_query_len = batch.bucket
    attend = CachedAttention(cache, batch.seqs, rows, max_query_len, implementation)
    slots = jnp.asarray(batch.slots)
    segments = _segments(pools, slots, implementation)
    attended = model.attended(
        jnp.asarray(batch.tokens),
        batch.seqs.positions(rows),
        attend,
        pools,
        segments,
        implementation=implementation,
    )
    ends = jnp.asarray(batch.logit_rows)
    if seqs < rows:
        # An idle sequence ends at another's row: without its adapter, for nobody's use.
        is_idle = jnp.diff(jnp.asarray(batch.seqs.bounds)) == 0
        slots = jnp.where(is_idle, -1, slots[ends])
        attended_ends = attended.take(ends)
        logits = token_logits(
            model, pools, attended_ends, slots, implementation=implementation
        )
    else:
        # Decode, say: all rows have logits, and their segments are there.
        hidden = model.hidden(attended, pools, segments, implementation=implementation)
        logits = model.logits(hidden[ends])
    return StepResult(most_likely(logits), logits, attended, attend.cache)


def token_logits(
    model: Llama,
    pools: LoraPools | None,
    attended: Attended,
    slots: Int32[Array, "rows"],
    *,
    implementation: str | None = None,
) -> Float[Array, "rows vocab"]:
    """Return the logits of the tokens after some rows of a step.

    Args:
      model, pools, implementation: the step's.
      attended: its rows behind the last attention, some or all.
      slots: their adapters, -1 for none.
    """
    segments = _segments(pools, slots, implementation)
    return model.logits(
        model.hidden(attended, pools, segments, implementation=implementation)
    )


def _segments(
    pools: LoraPools | None, slots: Array, implementation: str | None
) -> Segments | None:
    if pools is None:
        return None
    return segment_metadata(
        slots, num_slots=pools.num_slots, implementation=implementation
    )
