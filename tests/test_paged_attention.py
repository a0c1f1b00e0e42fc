import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.pallas_kernels import _attention_decode
from punica_jax.pallas_kernels._attention_decode import decode_attention
from punica_jax.pallas_kernels._attention_prefill import (
    PrefillConfig,
    prefill_attention,
)
from punica_jax.pallas_kernels._attention_warpgroups import warpgroup_attention
from punica_jax.pallas_kernels._decode_config import DecodeConfig, config_of
from punica_jax.pallas_kernels._dispatch import has_warpgroups
from punica_jax.pallas_kernels._paged_attention import paged_attention
from tests.attention_cases import NOWHERE, assert_near, assert_same, make_batch


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
# With heads enough for programs without splits.
AMONG_QUERY_LENS = [
    [1, 17, 1, 0, 1, 1, 5, 1, 20, 1, 1, 0, 2, 1, 1, 1],
    [1] * 15 + [0],
    [3, 2] * 8,
]


def kv_lens_of(query_lens, most):
    """Lengths below `most`, or as long as the rows."""
    return [max(n, (37 * n + 611 * i) % most) for i, n in enumerate(query_lens)]


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
        kv_heads = jax.P(None, None, "model")
        sharded = jax.shard_map(
            lambda *operands: paged_attention(
                *operands, max_query_len=5, implementation="xla"
            ),
            mesh=mesh,
            in_specs=(heads, kv_heads, everywhere, everywhere, everywhere),
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
            DecodeConfig(block_kv=16, splits=1, totals_late=True),
            DecodeConfig(block_kv=32, splits=2, totals_late=True),
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

    @pytest.mark.parametrize("splits", [1, 2])
    def test_an_order_of_programs_changes_no_bit(self, splits, monkeypatch):
        batch = make_batch(
            [1, 1, 0, 1, 1], [30, 150, 7, 1, 64], dtype="bfloat16", padding=3
        )
        attend = functools.partial(
            decode_attention,
            scale=0.125,
            config=DecodeConfig(block_kv=16, splits=splits),
            interpret=self.implementation == "pallas_interpret",
        )
        operands = batch.operands(fill=np.nan, table_fill=NOWHERE)
        expected = jax.jit(attend)(*operands)
        assert_near(expected, batch.expected())
        monkeypatch.setattr(_attention_decode, "AT_ONCE", 1)
        assert_same(jax.jit(lambda *arrays: attend(*arrays))(*operands), expected)

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

    @pytest.mark.parametrize("at_once", [256, 1])
    def test_one_row_among_longer_sequences_in_order(self, monkeypatch, at_once):
        """Of more programs than run at once, and called eagerly and by `jax.vmap`."""
        query_lens = AMONG_QUERY_LENS[0]
        kv_lens = kv_lens_of(query_lens, 200)
        shape = {"heads": 16, "kv_heads": 16, "head_dim": 24, "dtype": "float32"}
        batch = make_batch(query_lens, kv_lens, **shape, padding=3)
        q, *sequences = batch.operands(fill=np.nan, table_fill=NOWHERE)
        monkeypatch.setattr(_attention_decode, "AT_ONCE", at_once)
        attend = functools.partial(
            paged_attention, max_query_len=20, implementation=self.implementation
        )
        if at_once == 1:
            actual = attend(q, *sequences)
        else:
            actual, _ = jax.vmap(lambda q: attend(q, *sequences))(jnp.stack([q, q]))
        assert_near(actual, batch.expected())

    @pytest.mark.parametrize("query_lens", AMONG_QUERY_LENS)
    def test_one_row_among_longer_sequences(self, query_lens):
        """It is to the bit what the decode form gives, and prompts what theirs does."""
        kv_lens = kv_lens_of(query_lens, 200)
        shape = {"heads": 32, "kv_heads": 16, "head_dim": 16, "dtype": "bfloat16"}
        batch = make_batch(query_lens, kv_lens, **shape, padding=1)
        operands = batch.operands(fill=np.nan, table_fill=NOWHERE)
        assert config_of(*operands[:3]).splits == 1
        actual = self.run(batch, max_query_len=20, fill=np.nan, table_fill=NOWHERE)
        assert_near(actual, batch.expected())

        row_of = np.cumsum([0, *query_lens])
        rows, bounds = np.arange(row_of[-1]), jnp.asarray(row_of, jnp.int32)
        of_one = np.repeat(np.equal(query_lens, 1), query_lens)
        prompts = jax.jit(
            functools.partial(
                prefill_attention,
                max_query_len=20,
                scale=0.25,
                interpret=self.implementation == "pallas_interpret",
            )
        )(*operands[:3], bounds, operands[4])
        assert_same(actual[rows[~of_one]], prompts[rows[~of_one]])
        lone = dataclasses.replace(
            batch,
            q=[q if len(q) == 1 else q[:0] for q in batch.q],
            num_rows=query_lens.count(1) + 1,
        )
        decoded = self.run(lone, max_query_len=1)
        assert_same(actual[rows[of_one]], decoded[:-1])


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


# Of the first window's rows some are the sequence's before; a sequence is shorter than
# rows that a copy is aligned to, whole windows, or one of a later chunk.
WINDOWED_QUERY_LENS = [3, 0, 128, 1, 300, 64, 129, 5, 261]
WINDOWED_KV_LENS = [3, 0, 128, 700, 300, 512, 1000, 5, 262]


@pytest.mark.gpu
class TestWarpgroups(AttentionTests):
    """The form for many rows, of few ones too."""

    implementation = "pallas_triton"

    def run(self, batch, *, max_query_len, scale=None, **layout):
        q, *others = batch.operands(**layout)
        if not has_warpgroups() or q.dtype.itemsize != 2 or q.shape[2] not in (64, 128):
            pytest.skip("warp groups multiply 16 bits on Hopper, 64 or 128 wide")
        # What it takes besides is a multiple of 8 rows.
        more = jnp.pad(q, [(0, -len(q) % 8), (0, 0), (0, 0)], constant_values=np.nan)
        attend = functools.partial(
            warpgroup_attention, scale=scale or q.shape[2] ** -0.5
        )
        out = jax.jit(attend)(more, *others)
        np.testing.assert_array_equal(np.asarray(out[len(q) :], np.float32), 0)
        return out[: len(q)]

    def test_scale(self):
        batch = make_batch([5, 17], [9, 40], dtype="bfloat16")
        actual = self.run(batch, max_query_len=17, scale=0.75)
        assert_near(actual, batch.expected(scale=0.75))

    @pytest.mark.parametrize("padding", [0, 1, 6])
    def test_idle_batches_and_padding_rows_are_zeros(self, padding):
        for query_lens in ([0, 0, 1], [0, 0, 0]):
            if sum(query_lens) + padding:
                shape = {"dtype": "bfloat16", "padding": padding}
                batch = make_batch(query_lens, [20, 0, 20], **shape)
                actual = self.run(batch, max_query_len=8, fill=np.nan)
                assert_near(actual, batch.expected())

    @pytest.mark.parametrize("page_size", [16, 64, 256])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "head_dim"), [(8, 8, 128), (6, 2, 128), (14, 2, 64)]
    )
    def test_windows(self, heads, kv_heads, head_dim, dtype, page_size):
        batch = make_batch(
            WINDOWED_QUERY_LENS,
            WINDOWED_KV_LENS,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            padding=200,
        )
        actual = self.run(batch, max_query_len=300, fill=np.nan, table_fill=NOWHERE)
        assert_near(actual, batch.expected())

    @pytest.mark.parametrize("shape", [(8, 8, 128), (32, 8, 64)])
    def test_sequences_of_one_row_have_their_own_launch(self, shape):
        heads, kv_heads, head_dim = shape
        query_lens = [1, 130, 1, 0, 257, 1, 5, 1, *[1] * 24]
        kv_lens = kv_lens_of(query_lens, 900)
        batch = make_batch(
            query_lens,
            kv_lens,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype="bfloat16",
            padding=1024 - sum(query_lens),
        )
        operands = batch.operands(fill=np.nan, table_fill=NOWHERE)
        actual = apply(operands, max_query_len=1024, implementation=self.implementation)
        assert_near(actual, batch.expected())

    def test_more_windows_than_programs(self):
        lengths = [40] * 200 + [184]
        batch = make_batch(lengths, lengths, head_dim=128, dtype="bfloat16")
        actual = self.run(batch, max_query_len=184, fill=np.nan, table_fill=NOWHERE)
        assert_near(actual, batch.expected())
        again = self.run(batch, max_query_len=184, seed=1)
        assert_same(actual, again)
        # What `paged_attention` chooses for as many rows.
        assert batch.num_rows == 8184
        more = dataclasses.replace(batch, num_rows=8192)
        chosen = apply(
            more.operands(), max_query_len=8192, implementation=self.implementation
        )
        assert_same(chosen[:8184], actual)
