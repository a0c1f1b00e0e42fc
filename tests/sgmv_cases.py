"""Random adapters and rows, and the oracle that the kernel tests compare with."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from punica_jax.pallas_kernels import LoraPool
from punica_jax.pallas_kernels.shapes import segment_sizes

TOLERANCE = {
    "float32": {"rtol": 1e-5, "atol": 1e-5},
    "bfloat16": {"rtol": 3e-2, "atol": 2e-2},
    "float16": {"rtol": 5e-3, "atol": 5e-3},
}
NUMPY_DTYPE = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def rarely(*values):
    """A test's parameters that only the full grid runs."""
    return pytest.param(*values, marks=pytest.mark.grid)


def slots_of(popularity, rows, *, num_slots, num_idle=0, rng):
    """Draw each row's slot; `num_idle` rows of them idle, the order shuffled."""
    slots = np.full(rows, -1, np.int32)
    sizes = segment_sizes(popularity, rows - num_idle) if rows > num_idle else []
    names = rng.permutation(num_slots)[: len(sizes)]
    slots[num_idle:] = np.repeat(names, sizes)
    return rng.permutation(slots)


@dataclasses.dataclass
class Case:
    """One pool with true ranks, and a batch; float32 copies for the oracle."""

    x: np.ndarray
    y: np.ndarray
    a: list[list[np.ndarray]]  # slot, module -> [rank, d_in]
    b: list[list[np.ndarray]]  # slot, module -> [d_out, rank]
    pool: LoraPool
    dtype: np.dtype

    def expected(self, slots, weights=None):
        """Float32 sums, rounded where the kernel rounds."""
        out = self.y.astype(np.float32)
        x = self.x.astype(np.float32)
        for row, slot in enumerate(slots):
            if slot < 0:
                continue
            start = 0
            weight = np.float32(1.0 if weights is None else weights[row])
            for a, b in zip(self.a[slot], self.b[slot], strict=True):
                v = (a.astype(np.float32) @ x[row]) * weight
                v = v.astype(self.dtype).astype(np.float32)
                out[row, start : start + b.shape[0]] += b.astype(np.float32) @ v
                start += b.shape[0]
        return out.astype(self.dtype)


def make_case(
    *, rows, ranks, d_in=104, d_outs=(72, 40), dtype="float32", max_rank=None, seed=0
):
    """Build a pool with shuffled pages; free pages hold NaN.

    Args:
      ranks: one list of module ranks a slot.
    """
    rng = np.random.default_rng(seed)
    np_dtype = NUMPY_DTYPE[dtype]
    modules = len(d_outs)
    max_rank = max_rank or max(16, -(-max(map(max, ranks)) // 16) * 16)
    need = [max(-(-r // 16) for r in slot_ranks) for slot_ranks in ranks]
    num_pages = sum(need) + 2
    order = list(rng.permutation(num_pages))
    a_pages = np.full((num_pages, modules, 16, d_in), np.nan, np.float32)
    b_pages = np.full((num_pages, 16, sum(d_outs)), np.nan, np.float32)
    # Entries past a slot's pages point nowhere: following one would show.
    table = np.full((len(ranks), max_rank // 16), 2**30, np.int32)
    counts = np.zeros((len(ranks), modules), np.int32)
    all_a, all_b = [], []
    for slot, slot_ranks in enumerate(ranks):
        pages = [order.pop() for _ in range(need[slot])]
        table[slot, : need[slot]] = pages
        all_a.append([])
        all_b.append([])
        start = 0
        for c, (rank, d_out) in enumerate(zip(slot_ranks, d_outs, strict=True)):
            a = rng.standard_normal((rank, d_in)) / np.sqrt(d_in)
            b = rng.standard_normal((d_out, rank)) / np.sqrt(max(rank, 1))
            a, b = a.astype(np_dtype), b.astype(np_dtype)
            all_a[-1].append(a)
            all_b[-1].append(b)
            counts[slot, c] = -(-rank // 16)
            for p in range(counts[slot, c]):
                here = slice(16 * p, min(16 * p + 16, rank))
                size = here.stop - here.start
                a_pages[pages[p], c] = 0
                b_pages[pages[p], :, start : start + d_out] = 0
                a_pages[pages[p], c, :size] = a[here]
                b_pages[pages[p], :size, start : start + d_out] = b[:, here].T
            start += d_out
    pool = LoraPool(
        a=jnp.asarray(a_pages.astype(np_dtype)),
        b=jnp.asarray(b_pages.astype(np_dtype)),
        page_table=jnp.asarray(table),
        num_pages=jnp.asarray(counts),
        d_outs=tuple(d_outs),
    )
    x = rng.standard_normal((rows, d_in)).astype(np_dtype)
    y = rng.standard_normal((rows, sum(d_outs))).astype(np_dtype)
    return Case(x, y, all_a, all_b, pool, np_dtype)
