"""Our side: prompts of many adapters continued in one ragged batch, logits kept.

Steps as the engine runs them, through shuffled pages, but with the logits of every row.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import punica_jax as pj
from punica_jax.models import CachedAttention, KvCache, SeqTable

PAGE_SIZE = 16


class Continuation(NamedTuple):
    """A prompt, its greedy tokens, and the logits after every token but the last."""

    tokens: list[int]  # [prompt + new]
    logits: np.ndarray  # f32[prompt + new - 1, vocab]


def run_step(
    max_query_len: int,
    model: pj.Llama,
    pools: pj.LoraPools,
    cache: KvCache,
    table: SeqTable,
    tokens: jax.Array,
    row_slots: jax.Array,
) -> tuple[jax.Array, KvCache]:
    """Run flat rows; return the logits of all of them, and the cache after them."""
    rows = tokens.shape[0]
    attend = CachedAttention(cache, table, rows, max_query_len)
    segments = pj.segment_metadata(row_slots, num_slots=pools.num_slots)
    hidden = model(tokens, table.positions(rows), attend, pools, segments)
    return model.logits(hidden), attend.cache


def continue_prompts(
    model: pj.Llama,
    pools: pj.LoraPools,
    prompts: Sequence[Sequence[int]],
    slots: Sequence[int],
    *,
    max_new_tokens: int,
    rows: int,
    decode_form: bool = True,
    compiler_options: dict[str, Any] | None = None,
) -> list[Continuation]:
    """Continue every prompt under its slot's adapter (-1: none) by the best token.

    Args:
      rows: of the prefill's batch, at least what the prompts need.
      decode_form: decode by the program for one row a sequence; else by the prefill's,
        to compile half as much.
      compiler_options: of the steps' `jax.jit`.
    """
    seqs = len(prompts)
    longest = max(map(len, prompts)) + max_new_tokens
    pages_per_seq = -(-longest // PAGE_SIZE)
    shuffled = np.random.default_rng(0).permutation(seqs * pages_per_seq)
    page_table = jnp.asarray(shuffled.reshape(seqs, pages_per_seq), jnp.int32)
    cache = KvCache.zeros(model.config, seqs * pages_per_seq, PAGE_SIZE)
    # As pools are and what a step returns will be, for a program that is compiled once.
    cache = jax.device_put(cache, jax.devices()[0])

    @functools.cache
    def program(max_query_len: int) -> Any:
        run = functools.partial(run_step, max_query_len)
        return jax.jit(run, donate_argnums=2, compiler_options=compiler_options)

    tokens = [list(prompt) for prompt in prompts]
    logits: list[list[np.ndarray]] = [[] for _ in prompts]
    num_done = [0] * seqs
    for step in range(max_new_tokens):
        as_prefill = step == 0 or not decode_form
        parts = [row[done:] for row, done in zip(tokens, num_done, strict=True)]
        num_done = [len(row) for row in tokens]
        bounds = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
        flat = np.zeros(rows if as_prefill else seqs, np.int32)
        row_slots = np.full_like(flat, -1)
        flat[: bounds[-1]] = np.concatenate(parts)
        row_slots[: bounds[-1]] = np.repeat(slots, np.diff(bounds))
        table = SeqTable(
            page_table=page_table,
            bounds=jnp.asarray(bounds, jnp.int32),
            kv_lens=jnp.asarray(num_done, jnp.int32),
        )
        longest_part = max(map(len, prompts)) if as_prefill else 1
        out, cache = program(longest_part)(
            model, pools, cache, table, jnp.asarray(flat), jnp.asarray(row_slots)
        )
        out = np.asarray(out)
        for seq in range(seqs):
            new = out[bounds[seq] : bounds[seq + 1]]
            logits[seq].append(new)
            tokens[seq].append(int(new[-1].argmax()))
    return [
        Continuation(row, np.concatenate(parts))
        for row, parts in zip(tokens, logits, strict=True)
    ]
