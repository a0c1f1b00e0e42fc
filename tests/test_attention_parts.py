"""Decode attention that cuts long sequences into parts: who does what, and the sums."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.pallas_kernels import (
    _attention_parts,
    _dispatch,
    paged_attention,
)
from punica_jax.pallas_kernels._attention_decode import decode_attention
from punica_jax.pallas_kernels._attention_parts import (
    PartsConfig,
    parts_attention,
    parts_config,
)
from punica_jax.pallas_kernels._decode_config import DecodeConfig
from tests.attention_cases import NOWHERE, assert_near, assert_same, make_batch
from tests.test_attention_launches import lowered_kernels

SMALL = DecodeConfig(block_kv=16, splits=1)


def config_of(parts=4, part_blocks=2, decode=SMALL):
    return PartsConfig(decode=decode, parts=parts, part_blocks=part_blocks)


lengths = st.lists(st.integers(1, 400), min_size=5, max_size=5)
live = st.lists(st.booleans(), min_size=5, max_size=5)


def work_of(live, lengths, *, slots, config):
    bounds = np.cumsum([0, *live]).astype(np.int32)
    return np.asarray(
        _attention_parts._work_of_programs(
            bounds, np.int32(lengths), slots=slots, config=config
        )
    )


@hypothesis.given(
    live=live,
    lengths=lengths,
    parts=st.sampled_from([2, 4, 8]),
    part_blocks=st.integers(1, 5),
)
@hypothesis.settings(max_examples=60)
def test_each_block_has_one_program(live, lengths, parts, part_blocks):
    config = config_of(parts, part_blocks)
    work = work_of(live, lengths, slots=8, config=config).tolist()
    assert len(work) == 8 * parts
    busy = [program for program in work if program[-1]]
    assert work[: len(busy)] == busy, "those with nothing to do come last"
    sizes = [upper - lower for _, _, _, lower, upper, _, _ in busy]
    assert sizes == sorted(sizes, reverse=True)

    rows = {row: [] for row in range(8)}  # none of them twice, none forgotten
    for row, *program in busy:
        rows[row].append(program)
    seqs = [seq for seq in range(5) if live[seq]]
    for row, programs in rows.items():
        kv_len = lengths[seqs[row]] if row < len(seqs) else 0
        blocks = -(-kv_len // 16)
        if row < len(seqs):
            assert {seq for seq, *_ in programs} == {seqs[row]}
        assert {tokens for _, tokens, *_ in programs} == {kv_len}
        num_parts = len(programs)
        assert num_parts <= max(1, min(parts, blocks // part_blocks))
        assert {of for *_, of in programs} == {num_parts}
        assert sorted(part for *_, part, _ in programs) == list(range(num_parts))
        covered = [
            block
            for _, _, lower, upper, _, _ in sorted(programs, key=lambda own: own[4])
            for block in range(lower, upper)
        ]
        assert covered == list(range(blocks))
        assert num_parts == 1 or all(
            lower < upper for _, _, lower, upper, *_ in programs
        )


@hypothesis.given(
    query_lens=st.lists(st.integers(0, 3), min_size=5, max_size=5), lengths=lengths
)
@hypothesis.settings(max_examples=40)
def test_longer_sequences_have_no_program(query_lens, lengths):
    bounds = np.cumsum([0, *query_lens]).astype(np.int32)
    work = _attention_parts._work_of_programs(
        bounds, np.int32(lengths), slots=5, outside=100, config=config_of()
    )
    busy = [program for program in np.asarray(work).tolist() if program[-1]]
    found = {(row, seq, tokens) for row, seq, tokens, *_ in busy}
    assert found == {
        (bounds[seq], seq, lengths[seq]) for seq in range(5) if query_lens[seq] == 1
    }


@hypothesis.given(live=live, lengths=lengths, others=lengths, seq=st.integers(0, 4))
@hypothesis.settings(max_examples=40)
def test_neighbours_cut_nothing(live, lengths, others, seq):
    live = [*live[:seq], True, *live[seq + 1 :]]
    others = [*others[:seq], lengths[seq], *others[seq + 1 :]]

    def own(lengths):
        work = work_of(live, lengths, slots=5, config=config_of())
        return sorted(p[2:] for p in work.tolist() if p[-1] and p[1:3] == mine)

    mine = [seq, lengths[seq]]
    # An idle slot after the last sequence has its name, and no tokens.
    assert own(lengths) == own(others) != []


def test_layers_share_their_work():
    bounds, lens = np.arange(6, dtype=np.int32), np.arange(5, dtype=np.int32)

    @jax.jit
    def two_layers(bounds, lens):
        first, second = (
            _attention_parts._work_of_programs(
                bounds, lens, slots=5, config=config_of()
            )
            for _ in range(2)
        )
        return first * 2 + second

    text = two_layers.lower(bounds, lens).compile().as_text()
    assert len(re.findall(r" sort\(", text)) == 1


def operands_of(*, seqs, max_kv_len, kv_heads=8, heads=32):
    """Shapes of a batch that decodes, its pages of 64 tokens."""
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    index = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    return (
        array((seqs, heads, 128)),
        array((2, 100, kv_heads, 64, 128)),
        index((seqs, max_kv_len // 64)),
        index((seqs + 1,)),
        index((seqs,)),
    )


@pytest.mark.parametrize(
    ("max_kv_len", "parts"),
    [(2048, 0), (4096, 0), (4160, 2), (8192, 4), (16384, 8), (131072, 8)],
)
def test_how_many_parts(max_kv_len, parts):
    config = parts_config(*operands_of(seqs=32, max_kv_len=max_kv_len)[:3])
    assert (config.parts if config else 0) == parts
    if config:
        assert config.part_blocks * config.decode.block_kv == 2048


@pytest.mark.parametrize(("capability", "num_stages"), [(9.0, 4), (8.9, 3), (8.0, 3)])
def test_more_blocks_on_their_way_need_room(capability, num_stages, monkeypatch):
    monkeypatch.setattr(_dispatch, "_compute_capability", lambda: capability)
    config = parts_config(*operands_of(seqs=32, max_kv_len=8192)[:3])
    assert config is not None and config.decode.num_stages == num_stages


def test_a_launch_has_only_so_many_programs():
    assert parts_config(*operands_of(seqs=8191, max_kv_len=16384)[:3]) is not None
    assert parts_config(*operands_of(seqs=8192, max_kv_len=16384)[:3]) is None


def test_rows_of_prompts_are_no_programs():
    q, *others = operands_of(seqs=32, max_kv_len=16384)[:3]
    many = jax.ShapeDtypeStruct((8192, *q.shape[1:]), q.dtype)
    assert parts_config(many, *others) is None
    assert parts_config(many, *others, many) == parts_config(q, *others) is not None


def test_few_sequences_have_splits_instead():
    assert parts_config(*operands_of(seqs=8, max_kv_len=8192)[:3]) is None
    assert parts_config(*operands_of(seqs=1, max_kv_len=131072)[:3]) is None
    wide = operands_of(seqs=8, max_kv_len=8192, kv_heads=32)
    assert parts_config(*wide[:3]) is not None


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    ("max_kv_len", "first"), [(4096, "32x32x128xbf16"), (8192, "128x7xi32")]
)
def test_the_page_table_decides(max_kv_len, first, x64):
    operands = operands_of(seqs=32, max_kv_len=max_kv_len)
    with jax.enable_x64(x64):
        calls = lowered_kernels(operands, max_query_len=1)
    assert set(calls) == {"paged_attention_decode"}
    assert calls["paged_attention_decode"][0] == first


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: config_of(decode=DecodeConfig(block_kv=16, splits=2)),
            "decode.splits must be 1, got 2",
        ),
        (
            lambda: config_of(parts=1),
            "parts must be a power of two, at least 2, got 1",
        ),
        (
            lambda: config_of(parts=6),
            "parts must be a power of two, at least 2, got 6",
        ),
        (lambda: config_of(part_blocks=0), "part_blocks must be at least 1, got 0"),
    ],
)
def test_bad_configs(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


class PartsTests:
    """What parts must do on every device."""

    interpret: bool

    def run(self, batch, config=None, **layout):
        attend = functools.partial(
            parts_attention,
            scale=0.125,
            config=config or config_of(),
            interpret=self.interpret,
        )
        return jax.jit(attend)(*batch.operands(**layout))

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "head_dim"), [(2, 2, 64), (6, 2, 80), (5, 1, 128)]
    )
    @pytest.mark.parametrize(
        "config",
        [
            config_of(),
            config_of(parts=8, part_blocks=1),
            config_of(
                decode=DecodeConfig(
                    block_kv=32, splits=1, num_warps=2, num_stages=4, totals_late=True
                ),
                parts=2,
            ),
        ],
    )
    def test_it_is_attention(self, heads, kv_heads, head_dim, config):
        batch = make_batch(
            [1, 0, 1, 1, 1, 1],
            [1, 0, 300, 64, 700, 17],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype="bfloat16",
            padding=2,
        )
        attend = functools.partial(
            parts_attention,
            scale=head_dim**-0.5,
            config=config,
            interpret=self.interpret,
        )
        actual = jax.jit(attend)(*batch.operands(fill=np.nan, table_fill=NOWHERE))
        assert_near(actual, batch.expected())

    def test_whole_sequences_have_the_bits_that_they_have_elsewhere(self):
        batch = make_batch([1] * 4, [31, 500, 16, 1], dtype="bfloat16", padding=1)
        whole = functools.partial(
            decode_attention, scale=0.125, config=SMALL, interpret=self.interpret
        )
        expected = np.asarray(jax.jit(whole)(*batch.operands()))
        actual = np.asarray(self.run(batch))
        assert_same(actual[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])
        assert_near(actual, batch.expected())

    def test_neighbours_change_no_bit(self):
        batch = make_batch([1] * 4, [31, 500, 300, 170], dtype="bfloat16", padding=1)
        expected = np.asarray(self.run(batch))
        other = make_batch([1] * 4, [400, 500, 1, 170], dtype="bfloat16", seed=1)
        for name in ("q", "k", "v"):
            getattr(other, name)[1] = getattr(batch, name)[1]
        actual = np.asarray(self.run(other, fill=np.nan, table_fill=NOWHERE))
        assert_same(actual[1], expected[1])
        assert not np.array_equal(actual[0], expected[0])

    @pytest.mark.parametrize(
        "constant", [pytest.param(False, marks=pytest.mark.grid), True]
    )
    def test_layers_count_from_zero(self, constant):
        batch = make_batch([1] * 3, [200, 500, 90], dtype="float32")
        q, kv_pages, table, bounds, lens = batch.operands()
        attend = functools.partial(
            parts_attention, scale=0.125, config=config_of(), interpret=self.interpret
        )

        @jax.jit
        def layers(q, *others):
            if constant:
                others = (*others[:2], jnp.arange(4, dtype=jnp.int32), others[3])
            out = []
            for _ in range(3):
                out.append(attend(q, *others))
                q = q + out[-1]
            return out

        others = kv_pages, table, bounds, lens
        # A CPU's compiler, which knows more then, may round otherwise.
        check = assert_near if constant else assert_same
        for turn in layers(q, *others), layers(q, *others):
            own = q
            for out in turn:
                check(out, np.asarray(jax.jit(attend)(own, *others)))
                own = own + out

    @pytest.mark.parametrize("splits", [1, 4])
    @pytest.mark.parametrize("which", ["q", "k", "v"])
    def test_nan_stays_nan(self, which, splits):
        """Of its own row, whichever part of the sequence it is in."""
        batch = make_batch([1] * 3, [200, 500, 90], dtype="bfloat16")
        expected = np.isfinite(batch.expected().astype(np.float32))
        value = getattr(batch, which)[1]
        value[len(value) // 2, 0, :] = np.nan
        expected[1, 0] = False
        config = config_of()
        run = functools.partial(parts_attention, config=config)
        if splits > 1:
            decode = DecodeConfig(block_kv=16, splits=splits)
            run = functools.partial(decode_attention, config=decode)
        attend = functools.partial(run, scale=0.125, interpret=self.interpret)
        actual = np.asarray(jax.jit(attend)(*batch.operands()), np.float32)
        np.testing.assert_array_equal(np.isfinite(actual), expected)
        assert np.isnan(actual[1, 0]).all()

    def test_vmap(self):
        batch = make_batch([1] * 3, [200, 500, 90], dtype="float32")
        q, *others = batch.operands()
        qs = jnp.stack([q, 2 * q])
        attend = functools.partial(
            parts_attention, scale=0.125, config=config_of(), interpret=self.interpret
        )
        actual = jax.vmap(lambda q: attend(q, *others))(qs)
        for own, q in zip(actual, qs, strict=True):
            expected = np.asarray(attend(q, *others))
            np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


class TestInterpret(PartsTests):
    interpret = True

    def test_the_public_operation(self):
        """A page table of 4160 tokens, of which 4100 are one sequence's."""
        shape = {"heads": 8, "kv_heads": 8, "head_dim": 16, "page_size": 64}
        lens = [4100, *[3] * 31]
        batch = make_batch([1] * 32, lens, **shape, spare_pages=0)
        actual = paged_attention(
            *batch.operands(fill=np.nan, table_fill=NOWHERE),
            max_query_len=1,
            implementation="pallas_interpret",
        )
        assert_near(actual, batch.expected())

    def test_beside_prompts(self):
        shape = {"heads": 8, "kv_heads": 8, "head_dim": 16, "page_size": 64}
        query_lens, lens = [1] * 32, [4100, *[3] * 31]
        query_lens[1:4], lens[1:4] = [20, 0, 3], [50, 0, 4105]
        batch = make_batch(query_lens, lens, **shape, padding=2, spare_pages=0)
        operands = batch.operands(fill=np.nan, table_fill=NOWHERE)
        assert parts_config(*operands[:3]) is not None
        options = {"max_query_len": 20, "implementation": "pallas_interpret"}
        actual = paged_attention(*operands, **options)
        assert_near(actual, batch.expected())
        q, *sequences = operands
        twice = jax.vmap(lambda q: paged_attention(q, *sequences, **options))(
            jnp.stack([q, q])
        )
        for own in twice:
            np.testing.assert_allclose(own, actual, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
class TestTriton(PartsTests):
    interpret = False

    def test_beside_prompts(self):
        shape = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 64}
        query_lens, lens = [1] * 32, [400 + i for i in range(32)]
        query_lens[1:4], lens[1:4] = [20, 0, 3], [50, 0, 4105]
        lens[7] = 8189
        batch = make_batch(query_lens, lens, **shape, dtype="bfloat16", padding=10)
        attend = functools.partial(
            paged_attention, max_query_len=64, implementation="pallas_triton"
        )
        operands = batch.operands(fill=np.nan, table_fill=NOWHERE)
        assert parts_config(*operands[:3]) is not None
        actual = jax.jit(attend)(*operands)
        assert_near(actual, batch.expected())
        for _ in range(20):
            assert_same(jax.jit(attend)(*operands), actual)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize(
        ("seqs", "heads", "kv_heads", "head_dim", "spare_pages"),
        [
            (32, 32, 8, 128, 1),  # four parts, two programs a multiprocessor
            (16, 32, 8, 128, 1),  # one, with blocks of two pages
            (64, 16, 8, 64, 1),
            (16, 16, 16, 64, 40),  # eight parts
            (32, 128, 8, 80, 1),  # 16 queries a head of the cache
        ],
    )
    def test_the_public_operation(
        self, seqs, heads, kv_heads, head_dim, spare_pages, dtype
    ):
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        lens = [60] * seqs
        lens[1], lens[5], lens[-1] = 8189, 4096, 4032
        batch = make_batch(
            [1] * seqs,
            lens,
            **shape,
            page_size=64,
            dtype=dtype,
            spare_pages=spare_pages,
        )
        attend = functools.partial(
            paged_attention, max_query_len=1, implementation="pallas_triton"
        )
        operands = batch.operands(fill=np.nan, table_fill=NOWHERE)
        # So few programs of float32 have splits.
        has_parts = dtype != "float32" or seqs * kv_heads > 128
        assert (parts_config(*operands[:3]) is not None) == has_parts
        actual = jax.jit(attend)(*operands)
        assert_near(actual, batch.expected())
        for _ in range(20):
            assert_same(jax.jit(attend)(*operands), actual)
