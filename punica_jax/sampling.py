"""Choose the next token of each row from its logits.

Knows nothing of requests, batches or buckets: a row is logits, a temperature, a seed
and a position, and its random numbers depend on the last two alone.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32


def _gumbel_noise(
    seed: UInt32[Array, ""], position: Int32[Array, ""], vocab_size: int
) -> Float32[Array, "vocab"]:
    # Named, not the configured default: "rbg" draws differently under vmap, so a
    # row's numbers would depend on its neighbours.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)


def sample(
    logits: Float32[Array, "rows vocab"],
    temperature: Float32[Array, "rows"],
    seeds: UInt32[Array, "rows"],
    positions: Int32[Array, "rows"],
) -> Int32[Array, "rows"]:
    """Pick one token per row: the most likely one, or a draw at a temperature.

    *Semantics*: `argmax(logits[i])` where `temperature[i] == 0`, else
    `argmax(logits[i] + temperature[i] * g)` with g standard Gumbel noise drawn from
    `fold_in(key(seeds[i]), positions[i])`; the argmax is distributed as
    `softmax(logits[i] / temperature[i])` (the Gumbel-max trick). Ties go to the lowest
    token. A batch without a temperature draws nothing.

    Args:
        logits: scores; `-inf` excludes a token as long as one score in the row is
            finite.
        temperature: 0 for greedy, else positive and finite.
        seeds: one seed per row, see `SamplingParams.seed`.
        positions: index in its sequence of the token being generated
            (prompt length + tokens generated so far).

    Returns:
        token ids, 0 <= id < vocab.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Int32[Array, "rows"]:
        noise = jax.vmap(_gumbel_noise, in_axes=(0, 0, None))(
            seeds, positions, logits.shape[-1]
        )
        # Scaling the noise, not dividing the logits, keeps a tiny temperature exact.
        # Subtracting the maximum keeps the noise's bits beside large logits.
        shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
        drawn = jnp.argmax(shifted + temperature[:, None] * noise, axis=-1)
        return jnp.where(temperature > 0, drawn.astype(jnp.int32), greedy)

    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)
