"""A forward as one program of flat arrays: what it gives, and the memory of that.

Pure, but for `SpentForwards`, which keeps arrays for the next one. Knows batches and
seats as numbers; nothing of what is compiled, nor of who wants what of a step.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from punica_jax.batch import BLOCK_ROWS, Bucket
from punica_jax.models import LlamaConfig
from punica_jax.packing import unpack
from punica_jax.seats import fed_tokens, keep_tokens
from punica_jax.step import run_step

# What a sequence gets for a token whose logits are not all finite.
NO_TOKEN = -1


class Forward(NamedTuple):
    """A forward on its way, on the device.

    Attributes:
      likely: `i32[seqs]`, the most likely next tokens; `NO_TOKEN` where the logits have
        a NaN or no finite value is the greatest.
      logits: `f32[seqs, vocab]`.
      blocks: what `Attended.join` gives of the rows, `BLOCK_ROWS` a block, padded with
        zeros: one program takes the blocks of every bucket.
    """

    likely: jax.Array
    logits: jax.Array
    blocks: tuple[jax.Array, ...]


# Logits and blocks of one.
_Spent = tuple[jax.Array, tuple[jax.Array, ...]]


def _spent_shapes(
    config: LlamaConfig, dtype: Any, bucket: Bucket
) -> tuple[jax.ShapeDtypeStruct, tuple[jax.ShapeDtypeStruct, ...]]:
    width = config.hidden_size + config.d_in("o")
    block = jax.ShapeDtypeStruct((BLOCK_ROWS, width), dtype)
    logits = jax.ShapeDtypeStruct((bucket.seqs, config.vocab_size), jnp.float32)
    return logits, (block,) * -(-bucket.rows // BLOCK_ROWS)


def spent_bytes(config: LlamaConfig, dtype: Any, buckets: Iterable[Bucket]) -> int:
    """Return what `SpentForwards` takes for the steps of some buckets."""
    shapes = [_spent_shapes(config, dtype, own) for own in buckets if own.is_decode]
    return sum(one.size * one.dtype.itemsize for one in jax.tree.leaves(shapes))


class SpentForwards:
    """What decode steps gave and nobody needs any more: the next ones write there.

    XLA keeps what a step computes on the way in the memory of what it gives. Were that
    another one each time, as it is where a step is launched before the one before has
    ended, a CUDA graph would be updated, launch by launch: for half of Llama-2-7B's
    layers, 4 rows of one adapter, the host takes 0.61 ms instead of 1.41 (one H200).
    Prompts' steps are long, their blocks large.
    """

    def __init__(self, config: LlamaConfig, dtype: Any, bind: Callable[[Any], _Spent]):
        """Begin with nothing.

        Args:
          config: the model's.
          dtype: of its weights.
          bind: puts arrays where the model's are.
        """
        self._config, self._dtype, self._bind = config, dtype, bind
        self._arrays: dict[Bucket, _Spent] = {}

    def of(self, bucket: Bucket) -> _Spent | None:
        """Return what a step of a bucket may write to; `keep` what it gives.

        Where there is nothing, or a step was interrupted, other memory is taken.
        """
        if not bucket.is_decode:
            return None
        kept = self._arrays.get(bucket)
        if kept is None or any(one.is_deleted() for one in jax.tree.leaves(kept)):
            shapes = _spent_shapes(self._config, self._dtype, bucket)
            # Of NumPy: zeros of JAX would be a program that nobody compiles ahead.
            zeros = jax.tree.map(lambda one: np.zeros(one.shape, one.dtype), shapes)
            kept = self._arrays[bucket] = self._bind(zeros)
        return kept

    def keep(self, bucket: Bucket, result: Forward) -> None:
        """Let the next step of the bucket write where this one did."""
        if bucket.is_decode:
            self._arrays[bucket] = result.logits, result.blocks


def no_tokens(bucket: Bucket) -> np.ndarray:
    """Return `i32[seqs]`, which holds the place of the most likely tokens.

    The host reads these when the next step is launched already, so they are in other
    memory each time, and nothing that layers read may be kept there, as `SpentForwards`
    says. Nothing is while an argument that is read at the end has the place: the host
    launches all of Llama-2-7B, 32 rows of one adapter, in 1.2 ms instead of 2.2 (one
    H200).
    """
    return np.full(bucket.seqs, NO_TOKEN, np.int32)


def flat_forward(
    structure,
    implementation,
    weights,
    cache,
    newest,
    spent,
    place,
    pools,
    packed,
    layout,
):
    """Return each seat's newest token, a `Forward`, and the cache.

    The newest first, as among the arguments: JAX has results take what is donated in
    order, and a forward's most likely tokens may have the same shape.

    Args:
      structure: of the weights, as `nnx.split` and `jax.tree.flatten` gave them.
      implementation: which one runs.
      weights, cache, pools: the model's, flat; keys and values; the adapters.
      newest: `i32[seats]`.
      spent: of `SpentForwards`.
      place: `no_tokens`; like `cache`, `newest` and `spent` to be donated.
      packed, layout: of the batch and its `Feed`, by `pack`.
    """
    del spent  # its memory is the result's
    model = nnx.merge(*jax.tree.unflatten(structure, weights))
    batch, feed = unpack(packed, layout)
    batch = dataclasses.replace(batch, tokens=fed_tokens(newest, batch, feed))
    result = run_step(model, cache, pools, batch, implementation=implementation)
    top = jnp.take_along_axis(result.logits, result.likely[:, None], axis=1)[:, 0]
    likely = jnp.where(jnp.isfinite(top), result.likely, place)
    newest = keep_tokens(newest, feed.seats, likely)
    rows = result.attended.join()
    rows = jnp.pad(rows, ((0, -len(rows) % BLOCK_ROWS), (0, 0)))
    blocks = tuple(jnp.split(rows, len(rows) // BLOCK_ROWS))
    return newest, Forward(likely, result.logits, blocks), result.cache
