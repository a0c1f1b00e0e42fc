"""Log-probabilities of tokens, and of the most likely ones.

Knows logits and tokens; nothing of requests or of how tokens were chosen.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float32, Int32

from punica_jax.request import MAX_LOGPROBS, TokenLogprobs

# Below this a row is given to `lax.top_k` whole, which sorts it.
_MAX_SORTED = 512


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """How likely one token of each row is, and the most likely ones.

    Attributes:
      chosen: `f32[rows]`, the token's log-probability.
      rank: `i32[rows]`, 1 for the most likely.
      top_tokens: `i32[rows, top]`, the most likely first.
      top: `f32[rows, top]`, theirs.
    """

    chosen: Array | np.ndarray
    rank: Array | np.ndarray
    top_tokens: Array | np.ndarray
    top: Array | np.ndarray

    def pack(self) -> Int32[Array, "rows 2+2*top"]:
        """Return all of it as one array, floats by their bits; traceable."""
        chosen, top = (
            lax.bitcast_convert_type(jnp.asarray(one), jnp.int32)
            for one in (self.chosen, self.top)
        )
        columns = [chosen[:, None], self.rank[:, None], self.top_tokens, top]
        return jnp.concatenate(columns, axis=1)

    @classmethod
    def unpack(cls, packed: np.ndarray) -> "Logprobs":
        """Return what was packed: views of `i32[rows, 2 + 2 * top]`."""
        top_tokens, top = np.split(packed[:, 2:], 2, axis=1)
        return cls(
            packed[:, 0].view(np.float32),
            packed[:, 1],
            top_tokens,
            top.view(np.float32),
        )

    def of(self, row: int, num_top: int) -> TokenLogprobs:
        """Return a row's with as many of the most likely tokens as were asked for."""
        tokens = self.top_tokens[row, :num_top].tolist()
        top = dict(zip(tokens, self.top[row, :num_top].tolist(), strict=True))
        return TokenLogprobs(
            logprob=float(self.chosen[row]), rank=int(self.rank[row]), top=top
        )


def token_logprobs(
    logits: Float32[Array, "rows vocab"], tokens: Int32[Array, "rows"]
) -> Logprobs:
    """Return the log-probability of a token of each row, and of the top ones."""
    # -0.0 and 0.0 tie; `lax.top_k` has one below the other.
    logits = jnp.where(logits == 0, jnp.float32(0), logits)
    own = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = 1 + jnp.sum(logits > own, axis=1, dtype=jnp.int32)
    norm = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    top, top_tokens = largest(logits, min(MAX_LOGPROBS, logits.shape[1]))
    return Logprobs((own - norm)[:, 0], rank, top_tokens, top - norm)


def largest(
    values: Float32[Array, "rows width"], count: int
) -> tuple[Float32[Array, "rows count"], Int32[Array, "rows count"]]:
    """Return each row's largest values, in order, and their places.

    Ties go to the lowest place, as in `lax.top_k`, but no row is sorted: cut into
    chunks, the n largest values lie in the n chunks whose largest are largest. Those
    are found in the same way, and so are the values in them.
    """
    rows, width = values.shape
    if width <= max(_MAX_SORTED, 4 * count):
        top, places = lax.top_k(values, count)
        return top, places.astype(jnp.int32)
    # As many chunks as values in the chosen ones: the two searches are equal.
    chunk = math.isqrt(width // count)
    chunks = -(-width // chunk)
    padding = ((0, 0), (0, chunks * chunk - width))
    values = jnp.pad(values, padding, constant_values=-jnp.inf)
    values = values.reshape(rows, chunks, chunk)
    _, chosen = largest(jnp.max(values, axis=2), count)
    # In order, so that a tie still goes to the lowest place.
    chosen = jnp.sort(chosen, axis=1)
    inside = jnp.take_along_axis(values, chosen[:, :, None], axis=1)
    top, place = largest(inside.reshape(rows, count * chunk), count)
    first = jnp.take_along_axis(chosen, place // chunk, axis=1) * chunk
    return top, first + place % chunk
