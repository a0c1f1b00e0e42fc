"""Generation as one pure function, for use inside the caller's own `jax.jit`.

Knows token arrays; nothing of text, files or requests. `LLM` is the form that streams.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, UInt

from punica_jax.batch import Batch
from punica_jax.models import KvCache, Llama, LoraPools, SeqTable
from punica_jax.pallas_kernels import as_array, as_slots
from punica_jax.request import is_integer
from punica_jax.sampling import sample
from punica_jax.step import StepResult, run_step


def generate(
    model: Llama,
    pools: LoraPools | None,
    prompt_tokens: Int[Array, "seqs max_prompt"],
    prompt_lens: Int[Array, "seqs"],
    slots: Int[Array, "seqs"],
    *,
    max_new_tokens: int,
    eos_token_ids: int | Collection[int] | Int[Array, "..."] = (),
    temperature: Float[Array, "seqs"] | None = None,
    top_k: Int[Array, "seqs"] | None = None,
    top_p: Float[Array, "seqs"] | None = None,
    min_p: Float[Array, "seqs"] | None = None,
    seeds: UInt[Array, "seqs"] | None = None,
    page_size: int = 64,
    implementation: str | None = None,
) -> tuple[Int[Array, "seqs max_new_tokens"], Int[Array, "seqs"]]:
    """Continue every prompt under its own adapter: prefill, then a loop of steps.

    Pure, and without compiler options, so it may stand inside another `jax.jit`;
    lengths, slots, temperatures, filters and seeds are data. Gives the tokens that
    `LLM` gives; what is None is not compiled in.

    Args:
      model: the base model.
      pools: the loaded adapters, or None for the base alone.
      prompt_tokens: prompts, padded on the right with anything below the vocabulary.
      prompt_lens: 1 to max_prompt. Data, so not checked, like slots and seeds.
      slots: each sequence's adapter; -1, or anything that is no slot, for none.
      max_new_tokens: most new tokens, at least 1 (static).
      eos_token_ids: a token that ends a sequence, or several; the last one is kept.
      temperature: 0 (the default) is greedy, and then no filter matters.
      top_k: draw from the k most likely tokens; 0 or less is off.
      top_p: draw from the fewest most likely tokens that hold this share of what
        top_k leaves; 1 is off.
      min_p: draw from tokens at least so likely, relative to the most likely one.
      seeds: of the random numbers; default 0. Token k of a sequence draws from its
        seed and its position alone.
      page_size: tokens of a KV page (static).
      implementation: see `pallas_kernels.resolve`.

    Returns:
      The new tokens, 0 where a sequence has ended, and their number.

    Raises:
      ValueError: `model` or `pools` is something else, shapes do not fit,
        max_new_tokens is below 1, or tokens, lengths, slots, `top_k` or seeds are no
        integers.
    """
    if not isinstance(model, Llama):
        kind = type(model).__name__
        raise ValueError(f"model must be what load_model returns, got {kind}")
    if pools is not None and not isinstance(pools, LoraPools):
        kind = type(pools).__name__
        raise ValueError(
            f"pools must be what load_adapters returns, or None, got {kind}"
        )
    named = {"prompt_tokens": prompt_tokens, "prompt_lens": prompt_lens, "slots": slots}
    prompt_tokens, prompt_lens, slots = itertools.starmap(as_array, named.items())
    if prompt_tokens.ndim != 2 or 0 in prompt_tokens.shape:
        raise ValueError(
            f"prompt_tokens must be i32[seqs >= 1, max_prompt >= 1], "
            f"got {prompt_tokens.shape}"
        )
    seqs, max_prompt = prompt_tokens.shape
    stops = _token_ids(eos_token_ids)
    vectors = {
        "prompt_lens": prompt_lens,
        "slots": slots,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seeds": seeds,
    }
    for name, vector in vectors.items():
        if vector is not None and jnp.shape(vector) != (seqs,):
            raise ValueError(f"{name} must be [{seqs}], got {jnp.shape(vector)}")
    _check_integers({"prompt_tokens": prompt_tokens, **vectors})
    if not is_integer(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens must be an integer of at least 1, got {max_new_tokens!r}"
        )
    if not is_integer(page_size) or page_size < 16 or page_size & (page_size - 1):
        raise ValueError(
            f"page_size must be a power of two of at least 16, got {page_size!r}"
        )
    max_new_tokens, page_size = int(max_new_tokens), int(page_size)  # of NumPy's, too
    limit = model.config.max_position_embeddings
    if max_prompt + max_new_tokens > limit:
        raise ValueError(
            f"max_prompt {max_prompt} and max_new_tokens {max_new_tokens} exceed the "
            f"model's max_position_embeddings {limit}"
        )
    pages_per_seq = -(-(max_prompt + max_new_tokens) // page_size)
    page_table = jnp.arange(seqs * pages_per_seq, dtype=jnp.int32)
    page_table = page_table.reshape(seqs, pages_per_seq)
    cache = KvCache.zeros(model.config, seqs * pages_per_seq, page_size, model.dtype)
    prompt_lens = prompt_lens.astype(jnp.int32)
    slots = as_slots(slots, 0 if pools is None else pools.num_slots)
    if seeds is None:
        seeds = jnp.zeros((seqs,), jnp.uint32)

    def choose(result: StepResult, kv_lens: Array) -> Array:
        if temperature is None:
            return result.likely
        # The generated token's own position: all of the sequence comes before it.
        return sample(
            result.logits,
            jnp.asarray(temperature, jnp.float32),
            jnp.asarray(seeds, jnp.uint32),
            kv_lens,
            top_k=None if top_k is None else jnp.asarray(top_k, jnp.int32),
            top_p=None if top_p is None else jnp.asarray(top_p, jnp.float32),
            min_p=None if min_p is None else jnp.asarray(min_p, jnp.float32),
            implementation=implementation,
        )

    def batch_of(tokens, row_slots, bounds, kv_lens, max_query_len):
        return Batch(
            tokens=tokens,
            slots=row_slots,
            seqs=SeqTable(page_table, bounds, kv_lens),
            logit_rows=bounds[1:] - 1,
            max_query_len=max_query_len,
        )

    def ends(tokens):
        return jnp.isin(tokens, stops)

    rows = _ragged_rows(prompt_tokens, prompt_lens, slots)
    prefill = batch_of(*rows, prompt_lens, max_prompt)
    result = run_step(model, cache, pools, prefill, implementation=implementation)
    first, cache = choose(result, prompt_lens), result.cache
    new_tokens = jnp.zeros((seqs, max_new_tokens), jnp.int32).at[:, 0].set(first)
    counts = jnp.ones((seqs,), jnp.int32)
    bounds = jnp.arange(seqs + 1, dtype=jnp.int32)

    def unfinished(state):
        step, _, _, _, done, _ = state
        return (step < max_new_tokens) & ~done.all()

    def decode(state):
        step, last, new_tokens, counts, done, cache = state
        batch = batch_of(last, slots, bounds, prompt_lens + step, 1)
        result = run_step(model, cache, pools, batch, implementation=implementation)
        tokens, cache = choose(result, prompt_lens + step), result.cache
        kept = jnp.where(done, 0, tokens)
        new_tokens = lax.dynamic_update_index_in_dim(new_tokens, kept, step, 1)
        counts = counts + (~done).astype(jnp.int32)
        return step + 1, tokens, new_tokens, counts, done | ends(tokens), cache

    state = (jnp.int32(1), first, new_tokens, counts, ends(first), cache)
    _, _, new_tokens, counts, _, _ = lax.while_loop(unfinished, decode, state)
    return new_tokens, counts


def _token_ids(ids: Any) -> Array:
    """Return `i32[n]` of a token or several, which may be traced."""
    is_list = isinstance(ids, Sequence | Set) and not isinstance(ids, str)
    parts: list[Any] = list(ids) if is_list else [ids]
    if not all(map(_are_integers, parts)):
        raise ValueError(
            f"eos_token_ids must be an integer or a list of integers, got {ids!r}"
        )
    tokens = [jnp.ravel(part).astype(jnp.int32) for part in parts]
    return jnp.concatenate([jnp.zeros(0, jnp.int32), *tokens])


def _are_integers(part: Any) -> bool:
    if isinstance(part, Array | np.ndarray):
        return jnp.issubdtype(part.dtype, jnp.integer)
    return is_integer(part)


def _check_integers(arrays: Mapping[str, Any]) -> None:
    """Raise ValueError if one would be cast to integers: floats, True and False."""
    for name in ("prompt_tokens", "prompt_lens", "slots", "top_k", "seeds"):
        array = arrays[name]
        if array is not None and not _are_integers(array := jnp.asarray(array)):
            raise ValueError(f"{name} must be integers, got {array.dtype}; cast them")


def _ragged_rows(
    prompt_tokens: Array, prompt_lens: Array, slots: Array
) -> tuple[Array, Array, Array]:
    """Return the prompts' tokens as flat rows, each row's slot, and the bounds."""
    seqs, max_prompt = prompt_tokens.shape
    zero = jnp.zeros((1,), jnp.int32)
    bounds = jnp.concatenate([zero, jnp.cumsum(prompt_lens, dtype=jnp.int32)])
    row = jnp.arange(seqs * max_prompt, dtype=jnp.int32)
    seq = jnp.searchsorted(bounds[1:], row, side="right").astype(jnp.int32)
    live = seq < seqs
    seq = jnp.minimum(seq, seqs - 1)
    column = jnp.minimum(row - bounds[seq], max_prompt - 1)
    tokens = jnp.where(live, prompt_tokens[seq, column].astype(jnp.int32), 0)
    return tokens, jnp.where(live, slots[seq], -1), bounds
