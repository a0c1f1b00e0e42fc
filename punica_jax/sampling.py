"""Choose the next token of each row from its logits.

Knows nothing of requests, seats, batches or buckets: a row is logits, filters, a seed
and a position, and its random numbers depend on the last two alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from punica_jax.pallas_kernels import kth_largest, nucleus, order_keys


class _Choice(NamedTuple):
    """Candidates: tokens and their scores, arrays of one shape."""

    score: jax.Array
    token: jax.Array


def _random_halves(
    seeds: UInt32[Array, "rows"], positions: Int32[Array, "rows"], half: int
) -> tuple[UInt32[Array, "rows half"], UInt32[Array, "rows half"]]:
    """Return the random numbers of the first half of a vocabulary, and of the second.

    A hash, some 80 instructions, gives two numbers. What draws them by its own shape
    uses one of two, and takes 25 us for 32 rows of 128k tokens on an H200.
    """

    def of_row(seed: jax.Array, position: jax.Array) -> jax.Array:
        # Named, not the configured default: "rbg" draws differently under vmap, so a
        # row's numbers would depend on its neighbours.
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        counters = jnp.arange(2 * half, dtype=jnp.uint32)
        return threefry_2x32(jax.random.key_data(key), counters)

    bits = jax.vmap(of_row)(seeds, positions)
    return bits[:, :half], bits[:, half:]


def _gumbel(bits: UInt32[Array, "rows half"]) -> Float32[Array, "rows half"]:
    """Make standard Gumbel noise of random bits, as `jax.random.gumbel` does."""
    one = jnp.uint32(0x3F800000)
    mantissa = lax.shift_right_logical(bits, jnp.full_like(bits, 9))
    uniform = lax.bitcast_convert_type(mantissa | one, jnp.float32) - jnp.float32(1)
    # From the smallest normal number to 1 - 2**-23: -4.5 to 15.9.
    uniform = jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)
    return -jnp.log(-jnp.log(uniform))


def _better(left: _Choice, right: _Choice) -> _Choice:
    """Return the higher of each two scores; ties go to the lower token."""
    takes = (right.score > left.score) | (right.score != right.score)
    takes |= (right.score == left.score) & (right.token < left.token)
    return _Choice(*(jnp.where(takes, r, x) for x, r in zip(left, right, strict=True)))


def _best(choice: _Choice, vocab: int) -> Int32[Array, "rows"]:
    """Return the token of each row's highest score."""
    # Also a token that nobody may choose is before the one that is none.
    none = jnp.float32(-jnp.inf), jnp.int32(vocab)
    pair = tuple(choice)
    _, token = lax.reduce(
        pair, none, lambda x, y: _better(_Choice(*x), _Choice(*y)), (1,)
    )
    return token


def most_likely(logits: Float32[Array, "rows vocab"]) -> Int32[Array, "rows"]:
    """Return the most likely token of each row; ties go to the lowest."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


class _Cut(NamedTuple):
    """Where the filters cut each row; None where none of them does.

    Attributes:
      key: `i32[rows]`, the least of `order_keys` that stays.
      distance: `f32[rows]`, the least of a logit's distances from the row's maximum.
    """

    key: jax.Array | None
    distance: jax.Array | None

    def keeps(
        self, logits: Float32[Array, "rows tokens"], top: Float32[Array, "rows"]
    ) -> Bool[Array, "rows tokens"]:
        keep = jnp.ones(logits.shape, bool)
        if self.key is not None:
            keep &= order_keys(logits) >= self.key[:, None]
        if self.distance is not None:
            keep &= logits - top[:, None] >= self.distance[:, None]
        return keep


def _cut(
    logits: Float32[Array, "rows vocab"],
    temperature: Float32[Array, "rows"],
    *,
    top_k: Int32[Array, "rows"] | None = None,
    top_p: Float32[Array, "rows"] | None = None,
    min_p: Float32[Array, "rows"] | None = None,
    implementation: str | None = None,
) -> _Cut:
    key = distance = None
    if top_k is not None:
        key = kth_largest(logits, top_k, implementation=implementation)
    if top_p is not None:
        key = nucleus(
            logits, top_p, temperature, floor=key, implementation=implementation
        )
    if min_p is not None:
        # A share of the most likely token's probability.
        distance = jnp.where(min_p > 0, temperature * jnp.log(min_p), -jnp.inf)
    return _Cut(key, distance)


def kept_tokens(
    logits: Float32[Array, "rows vocab"],
    temperature: Float32[Array, "rows"],
    **filters: Any,
) -> Bool[Array, "rows vocab"]:
    """Return which tokens the filters leave, at least one a row.

    Args:
        filters: those of `sample`, and its implementation.
    """
    top = jnp.max(logits, axis=-1)
    return _cut(logits, temperature, **filters).keeps(logits, top)


def sample(
    logits: Float32[Array, "rows vocab"],
    temperature: Float32[Array, "rows"],
    seeds: UInt32[Array, "rows"],
    positions: Int32[Array, "rows"],
    *,
    top_k: Int32[Array, "rows"] | None = None,
    top_p: Float32[Array, "rows"] | None = None,
    min_p: Float32[Array, "rows"] | None = None,
    implementation: str | None = None,
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
        implementation: see `pallas_kernels.resolve`.

    Returns:
        token ids, 0 <= id < vocab.
    """
    draws = temperature > 0
    # A row that takes its most likely token has nothing to search for.
    if top_k is not None:
        top_k = jnp.where(draws, top_k, 0)
    if top_p is not None:
        top_p = jnp.where(draws, top_p, jnp.float32(1))
    cut = _cut(
        logits,
        temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        implementation=implementation,
    )
    top = jnp.max(logits, axis=-1)
    vocab = logits.shape[-1]
    half = -(-vocab // 2)

    def candidates(first: int, bits: jax.Array) -> _Choice:
        own = logits[:, first : first + half]
        # Of an odd vocabulary, the second half has one token that is none.
        fill = (0, 0, 0), (0, half - own.shape[1], 0)
        own = lax.pad(own, jnp.float32(-jnp.inf), fill)
        # Scaling the noise, not dividing the logits, keeps a tiny temperature exact.
        # Subtracting the maximum keeps the noise's bits beside large logits.
        score = own - top[:, None] + temperature[:, None] * _gumbel(bits)
        score = jnp.where(cut.keeps(own, top), score, -jnp.inf)
        token = lax.broadcasted_iota(jnp.int32, own.shape, 1) + jnp.int32(first)
        return _Choice(jnp.where(draws[:, None], score, own), token)

    # Both halves in one reduction, so that no random number is computed twice.
    bits = _random_halves(seeds, positions, half)
    return _best(_better(*map(candidates, (0, half), bits)), vocab)
