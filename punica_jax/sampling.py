"""Choose the next token of each row from its logits.

Knows nothing of requests, seats, batches or buckets: a row is logits, filters, a seed
and a position, and its random numbers depend on the last two alone.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

from punica_jax.thresholds import kth_largest, nucleus, order_keys


def _gumbel_noise(
    seed: UInt32[Array, ""], position: Int32[Array, ""], vocab_size: int
) -> Float32[Array, "vocab"]:
    # Named, not the configured default: "rbg" draws differently under vmap, so a
    # row's numbers would depend on its neighbours.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)


def most_likely(logits: Float32[Array, "rows vocab"]) -> Int32[Array, "rows"]:
    """Return the most likely token of each row; ties go to the lowest."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def kept_tokens(
    logits: Float32[Array, "rows vocab"],
    temperature: Float32[Array, "rows"],
    *,
    top_k: Int32[Array, "rows"] | None = None,
    top_p: Float32[Array, "rows"] | None = None,
    min_p: Float32[Array, "rows"] | None = None,
) -> jax.Array:
    """Return which tokens the filters leave; see `sample`.

    Returns:
        `bool[rows, vocab]`, at least one a row; True, of shape (), without filters.
    """
    keep = jnp.array(True)
    if top_k is None and top_p is None and min_p is None:
        return keep
    distance = logits - jnp.max(logits, axis=-1, keepdims=True)
    # Of the most likely token's probability. At a tiny temperature 0 / 0 is a 1.
    scaled = distance / temperature[:, None]
    weights = jnp.exp(jnp.where(distance == 0, jnp.float32(0), scaled))
    keys = order_keys(logits)
    if top_k is not None:
        limit = kth_largest(keys, jnp.minimum(top_k, logits.shape[-1]))
        keep = (keys >= limit[:, None]) | (top_k <= 0)[:, None]
    if top_p is not None:
        rest = jnp.where(keep, weights, jnp.float32(0))
        # A share that float32 takes for nothing would leave nothing.
        limit = jnp.minimum(nucleus(keys, rest, top_p), jnp.max(keys, axis=-1))
        # A share of 1 is everything, also what float32 sums do not notice.
        keep &= (keys >= limit[:, None]) | (top_p >= 1)[:, None]
    if min_p is not None:
        keep &= weights >= min_p[:, None]
    return keep


def sample(
    logits: Float32[Array, "rows vocab"],
    temperature: Float32[Array, "rows"],
    seeds: UInt32[Array, "rows"],
    positions: Int32[Array, "rows"],
    *,
    top_k: Int32[Array, "rows"] | None = None,
    top_p: Float32[Array, "rows"] | None = None,
    min_p: Float32[Array, "rows"] | None = None,
) -> Int32[Array, "rows"]:
    """Pick one token per row: the most likely one, or a draw at a temperature.

    *Semantics*: `argmax(logits[i])` where `temperature[i] == 0`, else
    `argmax(logits[i] + temperature[i] * g)` over the tokens that the filters keep, with
    g standard Gumbel noise drawn from `fold_in(key(seeds[i]), positions[i])`. The
    argmax is distributed as `p = softmax(logits[i] / temperature[i])` on those tokens
    (the Gumbel-max trick). Ties go to the lowest token.

    The filters, in order: top_k keeps the tokens that are not less likely than the
    k-th; top_p the most likely of those left, fewest first, until they hold a share of
    top_p of what is left; min_p those with `p >= min_p * max(p)`. Each keeps all tokens
    that tie at its limit. A filter that is None is not compiled in.

    Args:
        logits: scores; `-inf` excludes a token as long as one score in the row is
            finite.
        temperature: 0 for greedy, else positive and finite.
        seeds: one seed per row, see `SamplingParams.seed`.
        positions: index in its sequence of the token being generated
            (prompt length + tokens generated so far).
        top_k: 1 or more; 0 or less is off.
        top_p: above 0; 1 or more is off.
        min_p: 0 (off) to 1.

    Returns:
        token ids, 0 <= id < vocab.
    """
    keep = kept_tokens(logits, temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    noise = jax.vmap(_gumbel_noise, in_axes=(0, 0, None))(
        seeds, positions, logits.shape[-1]
    )
    # Scaling the noise, not dividing the logits, keeps a tiny temperature exact.
    # Subtracting the maximum keeps the noise's bits beside large logits.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    drawn = jnp.where(keep, shifted + temperature[:, None] * noise, -jnp.inf)
    return most_likely(jnp.where((temperature > 0)[:, None], drawn, logits))
