import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from punica_jax.pallas_kernels import _attention_decode, _attention_prefill
from punica_jax.pallas_kernels._attention_decode import DecodeConfig, decode_attention
from punica_jax.pallas_kernels._attention_prefill import (
    PrefillConfig,
    prefill_attention,
)
from punica_jax.pallas_kernels._attention_reference import (
    max_query_tiles,
    query_tiles,
)
from punica_jax.pallas_kernels._paged_attention import paged_attention

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
        shape = (num_pages, self.k[0].shape[1], page_size, self.k[0].shape[2])
        pools = [np.full(shape, fill, np.float32) for _ in range(2)]
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
        values = (q.astype(dtype), *(pool.astype(dtype) for pool in pools))
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


@functools.partial(
    jax.jit, static_argnames=("max_query_len", "scale", "implementation")
)
def apply(operands, *, max_query_len, implementation, scale=None):
    return paged_attention(
        *operands,
        max_query_len=max_query_len,
        scale=scale,
        implementation=implementation,
    )


def assert_near(actual, expected):
    actual = np.asarray(actual)
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(
        actual.astype(np.float32),
        expected.astype(np.float32),
        **TOLERANCE[expected.dtype.name],
    )


def assert_same(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


# heads, kv_heads, head_dim, page_size, dtype
SHAPES = [
    (2, 2, 64, 16, "float32"),
    (6, 2, 80, 16, "bfloat16"),
    (3, 1, 128, 64, "float16"),
]
DECODE_LENS = [1, 3, 64, 65, 256, 513]
# An idle sequence, decode rows, whole prompts and a later chunk of a longer one.
MIXED_QUERY_LENS = [3, 0, 1, 65, 1, 33, 16]
MIXED_KV_LENS = [3, 0, 64, 65, 1, 130, 16]


class AttentionTests:
    """What every implementation must do."""

    implementation: str

    def run(self, batch, *, max_query_len, scale=None, **layout):
        return apply(
            batch.operands(**layout),
            max_query_len=max_query_len,
            scale=scale,
            implementation=self.implementation,
        )

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "head_dim", "page_size", "dtype"), SHAPES
    )
    def test_decode(self, heads, kv_heads, head_dim, page_size, dtype):
        batch = make_batch(
            [1, 1, 0, 1, 1, 1, 1],
            [*DECODE_LENS[:2], 0, *DECODE_LENS[2:]],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            padding=1,
        )
        actual = self.run(batch, max_query_len=1, fill=np.nan, table_fill=NOWHERE)
        assert_near(actual, batch.expected())

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "head_dim", "page_size", "dtype"), SHAPES
    )
    def test_mixed(self, heads, kv_heads, head_dim, page_size, dtype):
        batch = make_batch(
            MIXED_QUERY_LENS,
            MIXED_KV_LENS,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            padding=9,
        )
        actual = self.run(batch, max_query_len=65, fill=np.nan, table_fill=NOWHERE)
        assert_near(actual, batch.expected())

    def test_scale(self):
        for query_lens in ([1, 1], [5, 17]):
            batch = make_batch(query_lens, [9, 40], head_dim=8)
            actual = self.run(batch, max_query_len=max(query_lens), scale=0.75)
            assert_near(actual, batch.expected(scale=0.75))

    @pytest.mark.parametrize("max_query_len", [1, 40])
    def test_what_else_the_pages_hold_changes_nothing(self, max_query_len):
        query_lens = [min(n, max_query_len) for n in (1, 40, 0, 16)]
        batch = make_batch(query_lens, [33, 47, 0, 16], dtype="bfloat16", padding=3)
        expected = self.run(batch, max_query_len=max_query_len)
        for layout in (
            {"fill": np.nan, "table_fill": NOWHERE},
            {"fill": np.inf, "table_fill": -1},
            {"seed": 1, "fill": -7.0},
        ):
            actual = self.run(batch, max_query_len=max_query_len, **layout)
            assert_same(actual, expected)

    @pytest.mark.parametrize("max_query_len", [1, 40])
    def test_neighbours_change_nothing(self, max_query_len):
        query_lens = [min(n, max_query_len) for n in (1, 40, 0, 17)]
        kv_lens = [33, 47, 0, 90]
        batch = make_batch(query_lens, kv_lens, dtype="bfloat16", padding=3)
        expected = np.asarray(self.run(batch, max_query_len=max_query_len))
        bounds = np.cumsum([0, *query_lens])

        order = [3, 2, 0, 1]
        permuted = dataclasses.replace(
            batch,
            q=[batch.q[seq] for seq in order],
            k=[batch.k[seq] for seq in order],
            v=[batch.v[seq] for seq in order],
        )
        actual = np.asarray(self.run(permuted, max_query_len=max_query_len))
        rows = [np.arange(bounds[seq], bounds[seq + 1]) for seq in order]
        assert_same(actual[: bounds[-1]], expected[np.concatenate(rows)])

        other = make_batch(query_lens, kv_lens, dtype="bfloat16", padding=3, seed=1)
        for name in ("q", "k", "v"):
            getattr(other, name)[1] = getattr(batch, name)[1]
        actual = np.asarray(self.run(other, max_query_len=max_query_len))
        kept = slice(bounds[1], bounds[2])
        assert_same(actual[kept], expected[kept])
        assert not np.array_equal(actual[: bounds[1]], expected[: bounds[1]])

    @pytest.mark.parametrize("max_query_len", [1, 8])
    @pytest.mark.parametrize("padding", [0, 1, 6])
    def test_idle_batches_and_padding_rows_are_zeros(self, max_query_len, padding):
        # More rows than sequences, fewer, and none that are live.
        for query_lens in ([0, 0, 1], [0, 0, 0]):
            if sum(query_lens) + padding == 0:
                continue
            batch = make_batch(query_lens, [20, 0, 20], padding=padding)
            actual = self.run(batch, max_query_len=max_query_len, fill=np.nan)
            assert_near(actual, batch.expected())
            assert not np.asarray(actual)[sum(query_lens) :].any()


class TestXla(AttentionTests):
    implementation = "xla"

    def test_shard_map_over_kv_heads(self):
        batch = make_batch([1, 5], [20, 40], heads=4, kv_heads=2)
        mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
        heads, everywhere = jax.P(None, "model"), jax.P()
        sharded = jax.shard_map(
            lambda *operands: paged_attention(
                *operands, max_query_len=5, implementation="xla"
            ),
            mesh=mesh,
            in_specs=(heads, heads, heads, everywhere, everywhere, everywhere),
            out_specs=heads,
        )
        assert_near(jax.jit(sharded)(*batch.operands()), batch.expected())


class KernelTests(AttentionTests):
    """What the kernels must do besides, whatever their configuration."""

    @pytest.mark.parametrize(
        "config",
        [
            DecodeConfig(block_kv=16, splits=1, num_warps=1),
            DecodeConfig(block_kv=32, splits=4),
            DecodeConfig(block_kv=64, splits=16, num_stages=3),
        ],
    )
    def test_decode_configs(self, config):
        batch = make_batch([1, 0, 1, 1], [1, 0, 300, 64], dtype="bfloat16")
        attend = functools.partial(
            decode_attention,
            scale=0.125,
            config=config,
            interpret=self.implementation == "pallas_interpret",
        )
        actual = jax.jit(attend)(*batch.operands(fill=np.nan, table_fill=NOWHERE))
        assert_near(actual, batch.expected())

    @pytest.mark.parametrize(
        "config",
        [
            PrefillConfig(block_rows=4, block_kv=16, num_stages=1),
            PrefillConfig(block_rows=32, block_kv=64, num_warps=8, num_stages=3),
        ],
    )
    def test_prefill_configs(self, config):
        batch = make_batch(
            MIXED_QUERY_LENS, MIXED_KV_LENS, heads=5, kv_heads=1, dtype="bfloat16"
        )
        attend = functools.partial(
            prefill_attention,
            max_query_len=65,
            scale=0.125,
            config=config,
            interpret=self.implementation == "pallas_interpret",
        )
        actual = jax.jit(attend)(*batch.operands(fill=np.nan, table_fill=NOWHERE))
        assert_near(actual, batch.expected())


class TestInterpret(KernelTests):
    implementation = "pallas_interpret"


@pytest.mark.gpu
class TestTriton(KernelTests):
    implementation = "pallas_triton"

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "head_dim"),
        [(8, 8, 128), (16, 4, 128), (14, 2, 64), (32, 1, 64), (4, 2, 256), (4, 4, 96)],
    )
    def test_larger(self, heads, kv_heads, head_dim, dtype):
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        shape |= {"page_size": 64, "dtype": dtype}
        batch = make_batch([1] * 8, [1, 63, 64, 65, 512, 513, 1023, 2], **shape)
        actual = self.run(batch, max_query_len=1, fill=np.nan, table_fill=NOWHERE)
        assert_near(actual, batch.expected())
        batch = make_batch([1, 130, 257, 64], [700, 130, 300, 512], **shape, padding=7)
        actual = self.run(batch, max_query_len=512, fill=np.nan, table_fill=NOWHERE)
        assert_near(actual, batch.expected())


@pytest.mark.parametrize(
    ("lengths", "rows", "block_rows"),
    [([5, 0, 1, 16, 17], 39, 8), ([0, 0], 4, 16), ([3], 3, 1), ([1, 1, 1], 3, 64)],
)
def test_query_tiles_cover_each_row_once(lengths, rows, block_rows):
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    tile_seq, tile_first = query_tiles(
        jnp.asarray(bounds), rows=rows, block_rows=block_rows
    )
    assert tile_seq.shape == (max_query_tiles(rows, len(lengths), block_rows),)
    covered = []
    for seq, first in zip(np.asarray(tile_seq), np.asarray(tile_first), strict=True):
        if seq >= 0:
            assert bounds[seq] <= first < bounds[seq + 1]
            covered += range(first, min(first + block_rows, bounds[seq + 1]))
    assert covered == list(range(bounds[-1]))


def lowered_kernels(operands, **options):
    """The kernels' custom calls in the CUDA lowering: name -> operand types."""
    mesh = AbstractMesh(
        (), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu")
    )
    attend = functools.partial(
        paged_attention, implementation="pallas_triton", **options
    )
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(attend).trace(*operands).lower(lowering_platforms=("cuda",))
    calls = {}
    for line in lowered.as_text().splitlines():
        if "__gpu$xla.gpu.triton" in line:
            name = re.search(r'name = "(\w+)"', line)
            types = re.search(r": \((.*)\) -> ", line)
            assert name and types
            assert name[1] not in calls
            calls[name[1]] = re.findall(r"tensor<([^>]*)>", types[1])
    return calls


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 80), (12, 4, 128)])
def test_cuda_lowering(heads, kv_heads, head_dim, dtype):
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    batch = make_batch([1] * 3, [30, 40, 50], **shape)
    calls = lowered_kernels(batch.operands(), max_query_len=1)
    assert set(calls) == {"paged_attention_decode", "paged_attention_combine"}
    # Page table, bounds and lengths reach the kernel as they are.
    assert calls["paged_attention_decode"][3:] == ["3x5xi32", "4xi32", "3xi32"]
    assert calls["paged_attention_combine"][-1] == "4xi32"

    batch = make_batch([30, 1, 9], [30, 40, 50], **shape)
    calls = lowered_kernels(batch.operands(), max_query_len=30)
    assert set(calls) == {"paged_attention_prefill"}
    assert calls["paged_attention_prefill"][3] == "3x5xi32"


def test_wide_decode_needs_no_second_launch():
    batch = make_batch([1] * 32, [20] * 32, heads=32, kv_heads=32, head_dim=8)
    calls = lowered_kernels(batch.operands(), max_query_len=1)
    assert set(calls) == {"paged_attention_decode"}


def decode_splits(*, seqs, kv_heads, max_kv_len):
    return _attention_decode.default_config(
        seqs=seqs,
        kv_heads=kv_heads,
        group=32 // kv_heads,
        head_dim=128,
        itemsize=2,
        max_kv_len=max_kv_len,
    ).splits


def test_decode_splits_fill_the_device_and_no_more():
    assert decode_splits(seqs=32, kv_heads=32, max_kv_len=4096) == 1
    assert decode_splits(seqs=1, kv_heads=32, max_kv_len=64) == 1
    for kv_heads in (8, 32):
        # Sequences of 8 tiles fill no 132 multiprocessors alone.
        assert decode_splits(seqs=1, kv_heads=kv_heads, max_kv_len=512) == 8
        assert decode_splits(seqs=1, kv_heads=kv_heads, max_kv_len=8192) >= 16


def test_prefill_tiles_follow_the_longest_query():
    config = functools.partial(
        _attention_prefill.default_config, group=4, head_dim=128, itemsize=2
    )
    assert config(max_query_len=5).block_rows == 8
    assert config(max_query_len=2).block_rows == 4
    assert config(max_query_len=4096).block_rows == config(max_query_len=64).block_rows


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DecodeConfig(block_kv=48, splits=1),
            "block_kv must be a power of two, at least 16, got 48",
        ),
        (
            lambda: DecodeConfig(block_kv=16, splits=0),
            "splits must be a power of two, at least 1, got 0",
        ),
        (
            lambda: PrefillConfig(block_rows=3, block_kv=16),
            "block_rows must be a power of two, at least 1, got 3",
        ),
        (
            lambda: PrefillConfig(block_rows=1, block_kv=8),
            "block_kv must be a power of two, at least 16, got 8",
        ),
    ],
)
def test_bad_configs(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


GOOD = {
    "q": ((4, 6, 16), "float32"),
    "k_pages": ((5, 2, 16, 16), "float32"),
    "v_pages": ((5, 2, 16, 16), "float32"),
    "page_table": ((3, 2), "int32"),
    "bounds": ((4,), "int32"),
    "kv_lens": ((3,), "int32"),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q": ((4, 96), "float32")},
            "q must be [rows, heads, head_dim], none of them 0, got shape (4, 96)",
        ),
        (
            {"q": ((0, 6, 16), "float32")},
            "q must be [rows, heads, head_dim], none of them 0, got shape (0, 6, 16)",
        ),
        (
            {"k_pages": ((5, 16, 16), "float32")},
            "k_pages must be [pages, kv_heads, page_size, head_dim], none of them 0, "
            "got shape (5, 16, 16)",
        ),
        (
            {"page_table": ((3,), "int32")},
            "page_table must be [seqs, pages_per_seq], none of them 0, got shape (3,)",
        ),
        (
            {"q": ((4, 6, 8), "float32")},
            "k_pages must have q's head_dim 8, got shape (5, 2, 16, 16)",
        ),
        (
            {"v_pages": ((5, 2, 16, 8), "float32")},
            "v_pages must have shape (5, 2, 16, 16) (k_pages (5, 2, 16, 16), "
            "page_table (3, 2)), got (5, 2, 16, 8)",
        ),
        (
            {"bounds": ((3,), "int32")},
            "bounds must have shape (4,) (k_pages (5, 2, 16, 16), page_table (3, 2)), "
            "got (3,)",
        ),
        (
            {"kv_lens": ((4,), "int32")},
            "kv_lens must have shape (3,) (k_pages (5, 2, 16, 16), page_table (3, 2)), "
            "got (4,)",
        ),
        (
            {"q": ((4, 6, 16), "int32")},
            "q must be one of float32, bfloat16, float16, got int32",
        ),
        (
            {"k_pages": ((5, 2, 16, 16), "bfloat16")},
            "k_pages must be float32, got bfloat16",
        ),
        ({"bounds": ((4,), "uint32")}, "bounds must be int32, got uint32"),
        (
            {"q": ((4, 5, 16), "float32")},
            "heads must be a multiple of kv_heads, got 5 heads and 2 kv_heads",
        ),
        (
            {
                "q": ((4, 6, 12), "float32"),
                "k_pages": ((5, 2, 16, 12), "float32"),
                "v_pages": ((5, 2, 16, 12), "float32"),
            },
            "head_dim must be a multiple of 8 and at most 256, got 12",
        ),
        (
            {
                "k_pages": ((5, 2, 48, 16), "float32"),
                "v_pages": ((5, 2, 48, 16), "float32"),
            },
            "page_size must be a power of two and at least 16, got 48",
        ),
        ({"max_query_len": 0}, "max_query_len must be at least 1, got 0"),
        ({"scale": 0.0}, "scale must be positive and finite, got 0.0"),
        ({"implementation": "cuda"}, "implementation must be one of"),
    ],
)
def test_bad_arguments(changes, message):
    options = {"max_query_len": 1}
    for name in ("max_query_len", "scale", "implementation"):
        if name in changes:
            options[name] = changes[name]
    operands = [
        jax.ShapeDtypeStruct(*changes.get(name, given)) for name, given in GOOD.items()
    ]
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(functools.partial(paged_attention, **options), *operands)
