"""Ragged batches in paged caches, and the oracle that attention is compared with."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np

# Relative, absolute.
TOLERANCE = {
    "float32": (1e-5, 1e-5),
    "bfloat16": (3e-2, 2e-2),
    "float16": (5e-3, 5e-3),
}
NUMPY_DTYPE = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
# An entry that points nowhere: reading it would show.
NOWHERE = 2**30


@dataclasses.dataclass
class Batch:
    """Sequences as plain arrays, and the cache that holds them."""

    q: list[np.ndarray]  # sequence -> [rows, heads, head_dim]
    k: list[np.ndarray]  # sequence -> [kv_len, kv_heads, head_dim]
    v: list[np.ndarray]
    page_size: int
    num_rows: int  # padding included
    pages_per_seq: int

    def operands(self, *, seed=0, fill=0.0, table_fill=0):
        """Lay the sequences out in shuffled pages; the rest of the pool is `fill`."""
        dtype, page_size = self.q[0].dtype, self.page_size
        needs = [-(-len(k) // page_size) for k in self.k]
        num_pages = sum(needs) + 3
        order = list(np.random.default_rng(seed).permutation(num_pages))
        shape = (2, num_pages, self.k[0].shape[1], page_size, self.k[0].shape[2])
        pools = np.full(shape, fill, np.float32)
        table = np.full((len(needs), self.pages_per_seq), table_fill, np.int32)
        for seq, need in enumerate(needs):
            table[seq, :need] = [order.pop() for _ in range(need)]
            for pool, tokens in zip(pools, (self.k[seq], self.v[seq]), strict=True):
                for token, value in enumerate(tokens):
                    page = table[seq, token // page_size]
                    pool[page, :, token % page_size] = value
        bounds = np.cumsum([0, *map(len, self.q)]).astype(np.int32)
        q = np.full((self.num_rows, *self.q[0].shape[1:]), fill, np.float32)
        q[: bounds[-1]] = np.concatenate(self.q)
        kv_lens = np.array([len(k) for k in self.k], np.int32)
        # What an idle sequence's length says must not matter.
        kv_lens[bounds[1:] == bounds[:-1]] = 12345
        values = (q.astype(dtype), pools.astype(dtype))
        return tuple(map(jnp.asarray, (*values, table, bounds, kv_lens)))

    def expected(self, scale=None):
        """Float64 sums, rounded once at the end; zeros for padding rows."""
        _, heads, head_dim = self.q[0].shape
        group = heads // self.k[0].shape[1]
        scale = head_dim**-0.5 if scale is None else scale
        out = np.zeros((self.num_rows, heads, head_dim), np.float64)
        row = 0
        for q, k, v in zip(self.q, self.k, self.v, strict=True):
            q, k, v = (x.astype(np.float64) for x in (q, k, v))
            for nth in range(len(q)):
                seen = len(k) - len(q) + nth + 1
                for head in range(heads):
                    scores = k[:seen, head // group] @ q[nth, head] * scale
                    weights = np.exp(scores - scores.max())
                    out[row, head] = weights @ v[:seen, head // group] / weights.sum()
                row += 1
        return out.astype(self.q[0].dtype)


def make_batch(
    query_lens,
    kv_lens,
    *,
    heads=2,
    kv_heads=2,
    head_dim=64,
    page_size=16,
    dtype="float32",
    padding=0,
    spare_pages=1,
    seed=0,
):
    rng = np.random.default_rng(seed)

    def draw(length, num_heads):
        value = rng.standard_normal((length, num_heads, head_dim))
        return value.astype(NUMPY_DTYPE[dtype])

    return Batch(
        q=[draw(length, heads) for length in query_lens],
        k=[draw(length, kv_heads) for length in kv_lens],
        v=[draw(length, kv_heads) for length in kv_lens],
        page_size=page_size,
        num_rows=sum(query_lens) + padding,
        pages_per_seq=-(-max(kv_lens) // page_size) + spare_pages,
    )


def assert_near(actual, expected):
    actual = np.asarray(actual)
    assert actual.dtype == expected.dtype
    rtol, atol = TOLERANCE[expected.dtype.name]
    np.testing.assert_allclose(
        actual.astype(np.float32), expected.astype(np.float32), rtol=rtol, atol=atol
    )


def assert_same(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))
