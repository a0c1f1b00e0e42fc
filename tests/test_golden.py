"""Logits against transformers and peft: the files of `make_golden.py`.

Each model's sequences, every one with an adapter of its own or none, run as one ragged
batch for the prompts, then one row each for the decode steps, through shuffled pages.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.models._checkpoint import load_model
from punica_jax.models._config import MODULE_GROUPS
from punica_jax.models._kv_cache import CachedAttention, KvCache, SeqTable
from punica_jax.models._llama import Llama
from punica_jax.models._lora import LoraPools, set_slot, slot_tables, write_page
from punica_jax.models._peft import read_adapter
from punica_jax.pallas_kernels import segment_metadata
from tests.adapter_cases import write_pages

ROOT = Path(__file__).parent / "golden" / "llama"
MODELS = sorted(path.name for path in ROOT.iterdir())
# This one decodes by the form for one row a sequence; the others by the program of
# their prefill, to compile half as much.
DECODE_FORM = ("gqa",)
# What these have, others have too: a bias on q, k and v "biased", frequencies of their
# own "rope_llama3", fused layers, a window and enlarged embeddings "rope_longrope";
# heads that share keys otherwise the tests of attention, an output head that is the
# embeddings those of checkpoints.
LEFT_TO_SLOW = (
    *("mistral", "phi3", "qwen2", "rope_yarn", "rope_linear"),
    *("mha", "mqa", "tied"),
)
RUNS = [
    *((name, name in DECODE_FORM) for name in MODELS if name not in LEFT_TO_SLOW),
    *(
        pytest.param(name, True, marks=pytest.mark.slow)
        for name in MODELS
        if name not in DECODE_FORM
    ),
]
PAGE_SIZE = 16
PAGES_PER_SEQ = 3
MAX_RANK = 32
# Of the logits' range; transformers and this library round in another order.
TOLERANCE = 1e-4


class Case(NamedTuple):
    """The sequences of one model's `expected.npz`."""

    tokens: list[np.ndarray]  # i32[prompt + decode steps]
    logits: list[np.ndarray]  # f32[prompt + decode steps, vocab]
    adapters: list[str | None]
    prompt_lens: np.ndarray

    @property
    def num_decode_steps(self) -> int:
        return len(self.tokens[0]) - int(self.prompt_lens[0])


def read_case(folder: Path) -> Case:
    with np.load(folder / "expected.npz") as saved:
        seqs = range(len(saved["prompt_lens"]))
        return Case(
            tokens=[saved[f"tokens_{seq}"] for seq in seqs],
            logits=[saved[f"logits_{seq}"] for seq in seqs],
            adapters=[str(name) or None for name in saved["adapters"]],
            prompt_lens=saved["prompt_lens"],
        )


def load_pools(model: Llama, folder: Path, names: list[str]) -> LoraPools:
    """Load adapters into slots 0, 1, ... of pools made for a few more."""
    adapters = [
        read_adapter(folder / "adapters" / name, model.config, dtype=jnp.float32)
        for name in names
    ]
    pools = LoraPools.zeros(
        model.config, num_slots=8, num_pages=12, max_rank=MAX_RANK, dtype=jnp.float32
    )
    free = {group: list(range(12))[::-1] for group in MODULE_GROUPS}
    write = jax.jit(write_page, static_argnames="group")
    for slot, adapter in enumerate(adapters):
        pages = {}
        for group in MODULE_GROUPS:
            pages[group] = [free[group].pop() for _ in range(adapter.num_pages(group))]
        pools = write_pages(pools, adapter, pages, write)
        counts = {group: adapter.counts(group) for group in MODULE_GROUPS}
        tables = slot_tables(pools, pages, counts)
        pools = set_slot(pools, jnp.int32(slot), jax.tree.map(jnp.asarray, tables))
    return pools


@functools.partial(jax.jit, static_argnames="max_query_len", donate_argnames="cache")
def step(model, pools, cache, table, tokens, row_slots, max_query_len):
    """Run the rows of a batch; return all their logits and the cache after them."""
    rows = tokens.shape[0]
    attend = CachedAttention(cache, table, rows, max_query_len)
    segments = segment_metadata(row_slots, num_slots=pools.num_slots)
    hidden = model(tokens, table.positions(rows), attend, pools, segments)
    return model.logits(hidden), attend.cache


def run_case(
    model: Llama, case: Case, pools: LoraPools, slots: list[int], decode_form: bool
):
    """Yield `(seq, position, logits)` of every row, prefill first, then decode."""
    seqs = len(case.tokens)
    num_pages = seqs * PAGES_PER_SEQ
    rng = np.random.default_rng(0)
    page_table = rng.permutation(num_pages).reshape(seqs, PAGES_PER_SEQ)
    page_table = jnp.asarray(page_table, jnp.int32)
    cache = KvCache.zeros(model.config, num_pages, PAGE_SIZE)

    def run(firsts, lens, rows, max_query_len):  # one step; yields its rows
        nonlocal cache
        bounds = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        tokens = np.zeros(rows, np.int32)
        row_slots = np.full(rows, -1, np.int32)
        for seq in range(seqs):
            part = slice(bounds[seq], bounds[seq + 1])
            tokens[part] = case.tokens[seq][firsts[seq] : firsts[seq] + lens[seq]]
            row_slots[part] = slots[seq]
        table = SeqTable(
            page_table=page_table,
            bounds=jnp.asarray(bounds),
            kv_lens=jnp.asarray(firsts + lens, jnp.int32),
        )
        logits, cache = step(
            model, pools, cache, table, tokens, row_slots, max_query_len
        )
        logits = np.asarray(logits)
        for seq in range(seqs):
            for row in range(lens[seq]):
                yield seq, firsts[seq] + row, logits[bounds[seq] + row]

    ones = np.ones(seqs, np.int32)
    lens = case.prompt_lens
    prefill = {"rows": int(lens.sum()) + 3, "max_query_len": int(lens.max())}
    decode = {"rows": seqs + 2, "max_query_len": 1} if decode_form else prefill
    yield from run(0 * ones, lens, **prefill)
    for index in range(case.num_decode_steps):
        yield from run(lens + index, ones, **decode)


@pytest.mark.parametrize(("name", "decode_form"), RUNS)
def test_logits_equal_transformers_and_peft(name, decode_form):
    folder = ROOT / name
    case = read_case(folder)
    model = load_model(folder, progress=False)
    names = list(dict.fromkeys(n for n in case.adapters if n is not None))
    assert names
    assert None in case.adapters
    pools = load_pools(model, folder, names)
    slots = [-1 if n is None else names.index(n) for n in case.adapters]
    ranges = [float(np.ptp(expected)) for expected in case.logits]

    run = functools.partial(run_case, model, case, pools, decode_form=decode_form)
    compared = 0
    for seq, position, logits in run(slots=slots):
        np.testing.assert_allclose(
            logits,
            case.logits[seq][position],
            rtol=0,
            atol=TOLERANCE * ranges[seq],
            err_msg=f"sequence {seq} (adapter {case.adapters[seq]}), {position=}",
        )
        compared += 1
    assert compared == sum(len(tokens) for tokens in case.tokens)

    # Without their adapters the same sequences are far away: each of them shows.
    errors = np.zeros(len(slots))
    for seq, position, logits in run(slots=[-1] * len(slots)):
        error = np.abs(logits - case.logits[seq][position]).max() / ranges[seq]
        errors[seq] = max(errors[seq], error)
    assert all(
        error > 100 * TOLERANCE if slot >= 0 else error <= TOLERANCE
        for error, slot in zip(errors, slots, strict=True)
    )
