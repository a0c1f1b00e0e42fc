"""Everything about paged attention but its values: tiles, launches, configurations,
and what bad arguments get."""

import functools
import re
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from punica_jax.pallas_kernels import (
    _attention_decode,
    _attention_prefill,
    _attention_warpgroups,
    _decode_config,
    _dispatch,
)
from punica_jax.pallas_kernels._attention_prefill import PrefillConfig
from punica_jax.pallas_kernels._attention_reference import (
    max_query_tiles,
    query_tiles,
)
from punica_jax.pallas_kernels._decode_config import DecodeConfig
from punica_jax.pallas_kernels._dispatch import has_warpgroups
from punica_jax.pallas_kernels._paged_attention import paged_attention
from tests.attention_cases import make_batch
from tests.warpgroup_cases import HOPPER


@pytest.mark.parametrize(
    ("lengths", "rows", "block_rows", "aligned"),
    [
        ([5, 0, 1, 16, 17], 39, 8, 1),
        ([0, 0], 4, 16, 1),
        ([3], 3, 1, 1),
        ([1, 1, 1], 3, 64, 1),
        ([5, 0, 1, 16, 17], 39, 8, 8),
        ([0, 0], 4, 16, 8),
        ([3], 3, 8, 8),
        ([1, 1, 1], 3, 64, 8),
    ],
)
def test_query_tiles_cover_each_row_once(lengths, rows, block_rows, aligned):
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    tile_seq, tile_first = query_tiles(
        jnp.asarray(bounds), rows=rows, block_rows=block_rows, aligned=aligned
    )
    most = max_query_tiles(rows, len(lengths), block_rows, aligned)
    assert tile_seq.shape == (most,)
    covered = []
    for seq, first in zip(np.asarray(tile_seq), np.asarray(tile_first), strict=True):
        if seq >= 0:
            assert bounds[seq] - aligned < first < bounds[seq + 1]
            assert first % aligned == 0
            end = min(first + block_rows, bounds[seq + 1])
            covered += range(max(first, bounds[seq]), end)
    assert covered == list(range(bounds[-1]))


window_table = jax.jit(
    _attention_warpgroups._window_table, static_argnames=("rows", "skip_lone")
)


@hypothesis.given(
    lengths=st.sampled_from([1, 9]).flatmap(
        lambda seqs: st.lists(
            st.one_of(st.integers(0, 20), st.integers(0, 700)),
            min_size=seqs,
            max_size=seqs,
        )
    ),
    most=st.sampled_from([8, 40, 304, 2056, 6304]),
    many=st.booleans(),
)
@hypothesis.settings(max_examples=60)
def test_windows_hold_each_row_once(lengths, most, many):
    # Few numbers of sequences and rows: each makes a program.
    rows = _attention_warpgroups._EVEN_ROWS if many else most
    lengths = np.diff(np.minimum(np.cumsum([0, *lengths]), rows)).tolist()
    used = sum(lengths)
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    kv_lens = np.array([length + 3 * i for i, length in enumerate(lengths)], np.int32)
    table, count = window_table(jnp.asarray(bounds), jnp.asarray(kv_lens), rows=rows)
    windows = np.asarray(table)[: int(count[0])]
    seen = []
    for seq, first, begin, end, position in windows:
        assert first % 8 == 0
        assert 0 <= begin < end <= 128
        seen += [(first + row, seq, position + row) for row in range(begin, end)]
    expected = [
        (bounds[seq] + nth, seq, kv_lens[seq] - length + nth)
        for seq, length in enumerate(lengths)
        for nth in range(length)
    ]
    assert sorted(row for row in seen if row[1] >= 0) == expected
    assert sorted(row[0] for row in seen if row[1] < 0) == list(range(used, rows))
    if not many:
        # The last ones see the most.
        tokens = [0 if seq < 0 else end + at for seq, _, _, end, at in windows]
        assert tokens == sorted(tokens)


@hypothesis.given(
    lengths=st.lists(st.sampled_from([0, 1, 1, 2, 7, 130]), min_size=9, max_size=9),
    padding=st.sampled_from([0, 1, 40]),
)
@hypothesis.settings(max_examples=40)
def test_windows_leave_out_sequences_of_one_row(lengths, padding):
    rows = 1240
    lengths[0] += rows - padding - sum(lengths)  # one program for all of them
    bounds = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    kv_lens = jnp.asarray(lengths, jnp.int32) + 3
    windows = {
        skip_lone: {
            tuple(window) for window in np.asarray(table)[: int(count[0])].tolist()
        }
        for skip_lone in (False, True)
        for table, count in [
            window_table(bounds, kv_lens, rows=rows, skip_lone=skip_lone)
        ]
    }
    assert windows[True] == {
        window for window in windows[False] if window[0] < 0 or lengths[window[0]] != 1
    }


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
        if "__gpu$xla.gpu.triton" in line or "@mosaic_gpu" in line:
            name = re.search(r'name = "(\w+)"|@(mosaic_gpu)', line)
            types = re.search(r": \((.*)\) -> ", line)
            assert name and types
            name = name[1] or name[2]
            assert name not in calls
            calls[name] = re.findall(r"tensor<([^>]*)>", types[1])
    return calls


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 80), (12, 4, 128)])
def test_cuda_lowering(heads, kv_heads, head_dim, dtype):
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    batch = make_batch([1] * 3, [30, 40, 50], **shape)
    calls = lowered_kernels(batch.operands(), max_query_len=1)
    assert set(calls) == {"paged_attention_decode", "paged_attention_combine"}
    # Page table, bounds and lengths reach the kernel as they are.
    assert calls["paged_attention_decode"][2:] == ["3x5xi32", "4xi32", "3xi32"]
    assert calls["paged_attention_combine"][-1] == "4xi32"

    batch = make_batch([30, 1, 9], [30, 40, 50], **shape)
    calls = lowered_kernels(batch.operands(), max_query_len=30)
    assert set(calls) == {"paged_attention_prefill"}
    assert calls["paged_attention_prefill"][2] == "3x5xi32"


@pytest.mark.parametrize(
    ("platform", "capability", "version", "cuda", "expected"),
    [
        ("gpu", "9.0", (0, 11, 2), 13000, True),
        ("gpu", "9.0", (0, 11, 2), 12091, True),
        ("gpu", "9.0", (0, 11, 2), 12060, True),
        ("gpu", "9.0", (0, 11, 2), 12080, False),
        ("gpu", "9.0", (0, 11, 2), 12090, False),
        ("gpu", "9.0", (0, 10, 2), 13000, False),
        ("gpu", "8.0", (0, 11, 2), 13000, False),
        ("gpu", "10.0", (0, 11, 2), 13000, False),
        ("gpu", "gfx942", (0, 11, 2), 0, False),
        ("cpu", None, (0, 11, 2), 0, True),
    ],
)
def test_which_devices_have_warp_groups(
    platform, capability, version, cuda, expected, monkeypatch
):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(_dispatch, "_default_device", lambda: device)
    monkeypatch.setattr(_dispatch, "_cuda_version", lambda: cuda)
    monkeypatch.setattr(jax, "__version_info__", version)
    assert has_warpgroups() == expected
    assert _dispatch.multiprocessors() == 132


@HOPPER
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "dtype", "found"),
    [
        (8192, 4, 1, 128, "bfloat16", "mosaic_gpu"),
        (8192, 4, 1, 64, "float16", "mosaic_gpu"),
        (2048, 4, 4, 128, "bfloat16", "mosaic_gpu"),
        # Of few rows more decode, which heads that share keys do at once elsewhere.
        (2048, 4, 2, 128, "bfloat16", "paged_attention_prefill"),
        (1024, 4, 4, 128, "bfloat16", "paged_attention_prefill"),
        # What these programs have no products or copies for.
        (8192, 2, 2, 80, "bfloat16", "paged_attention_prefill"),
        (8192, 2, 2, 64, "float32", "paged_attention_prefill"),
        (8196, 2, 2, 64, "bfloat16", "paged_attention_prefill"),
    ],
)
def test_many_rows_go_to_warp_groups(
    rows, heads, kv_heads, head_dim, dtype, found, x64
):
    batch = make_batch(
        [1], [70], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )
    _, *others = batch.operands()
    q = jnp.zeros((rows, heads, head_dim), dtype)
    with jax.enable_x64(x64):
        calls = lowered_kernels((q, *others), max_query_len=rows)
    assert set(calls) == {found}
    assert calls[found][2] == "1x6xi32"


@HOPPER
@pytest.mark.parametrize("kv_heads", [8, 32])
@pytest.mark.parametrize(
    ("rows", "prompts"),
    [
        (64, "paged_attention_prefill"),
        (512, "paged_attention_prefill"),
        (1024, "mosaic_gpu"),
    ],
)
def test_rows_that_decode_have_a_launch_beside_prompts(rows, prompts, kv_heads):
    shape = {"heads": 32, "kv_heads": kv_heads, "head_dim": 64, "dtype": "bfloat16"}
    batch = make_batch([1] * 32, [20] * 32, **shape, padding=rows - 32)
    calls = lowered_kernels(batch.operands(), max_query_len=rows)
    assert set(calls) == {prompts, "paged_attention_decode"}
    # It takes a slot for each sequence, none for padding rows, and others' result.
    *first, others = calls["paged_attention_decode"]
    assert first[0] == (f"{rows}x32x64xbf16" if kv_heads == 8 else "32xi32")
    assert others == f"{rows}x32x64xbf16"


@pytest.mark.parametrize(
    ("kv_heads", "seqs", "has_own"),
    [
        (8, 15, False),
        (8, 16, True),
        (8, 17, False),
        (8, 31, False),
        (8, 32, True),
        (32, 7, False),
        (32, 8, True),
        (32, 9, True),
    ],
)
def test_how_many_sequences_have_a_launch_for_those_of_one_row(kv_heads, seqs, has_own):
    shape = {"heads": 32, "kv_heads": kv_heads, "head_dim": 64, "dtype": "bfloat16"}
    batch = make_batch([1] * seqs, [200] * seqs, **shape, padding=64 - seqs)
    calls = lowered_kernels(batch.operands(), max_query_len=64)
    assert ("paged_attention_decode" in calls) == has_own


def test_one_sequence_is_no_mixture():
    shape = {"heads": 32, "kv_heads": 32, "head_dim": 64, "dtype": "bfloat16"}
    # A page table for one block, which has no splits.
    batch = make_batch([1], [20], **shape, padding=15)
    calls = lowered_kernels(batch.operands(), max_query_len=16)
    assert set(calls) == {"paged_attention_prefill"}


def test_wide_decode_needs_no_second_launch():
    batch = make_batch([1] * 32, [20] * 32, heads=32, kv_heads=32, head_dim=8)
    calls = lowered_kernels(batch.operands(), max_query_len=1)
    assert set(calls) == {"paged_attention_decode"}


@pytest.mark.parametrize("x64", [False, True])
def test_more_programs_than_run_at_once_take_an_order(x64):
    shape = {"heads": 16, "kv_heads": 8, "head_dim": 16, "dtype": "bfloat16"}
    for seqs, first in ((32, "32x16x16xbf16"), (33, "33xi32")):
        batch = make_batch([1] * seqs, [20] * seqs, **shape)
        operands = batch.operands()
        with jax.enable_x64(x64):
            calls = lowered_kernels(operands, max_query_len=1)
        assert calls["paged_attention_decode"][0] == first


def test_layers_share_an_order():
    bounds, lens = np.arange(6, dtype=np.int32), np.arange(5, dtype=np.int32)

    @jax.jit
    def two_layers(bounds, lens):
        orders = [
            _attention_decode.longest_first(bounds, lens, slots=5) for _ in range(2)
        ]
        return orders[0] * 2 + orders[1]

    text = two_layers.lower(bounds, lens).compile().as_text()
    assert len(re.findall(r" sort\(", text)) == 1


@hypothesis.given(
    live=st.lists(st.booleans(), min_size=5, max_size=5),
    lengths=st.lists(st.integers(1, 50), min_size=5, max_size=5),
)
@hypothesis.settings(max_examples=60)
def test_the_longest_are_first_and_idle_slots_last(live, lengths):
    bounds = np.cumsum([0, *live]).astype(np.int32)
    order = _attention_decode.longest_first(bounds, np.int32(lengths), slots=8)
    order = np.asarray(order).tolist()
    tokens = [n if own else 0 for n, own in zip(lengths, live, strict=True)] + [0] * 3
    # Of as many tokens the first is first, so that equal ones keep their order.
    assert order == sorted(range(8), key=lambda slot: -tokens[slot])


def decode_config(*, seqs, kv_heads, max_kv_len):
    return _decode_config.default_config(
        seqs=seqs,
        kv_heads=kv_heads,
        group=32 // kv_heads,
        head_dim=128,
        itemsize=2,
        max_kv_len=max_kv_len,
    )


def decode_splits(**shape):
    return decode_config(**shape).splits


def test_decode_splits_fill_the_device_and_no_more():
    assert decode_splits(seqs=32, kv_heads=32, max_kv_len=4096) == 1
    assert decode_splits(seqs=32, kv_heads=8, max_kv_len=4096) == 1
    # Two programs for each of 132 multiprocessors, as far as tiles and the limit go.
    assert decode_splits(seqs=1, kv_heads=32, max_kv_len=8192) == 8
    assert decode_splits(seqs=1, kv_heads=8, max_kv_len=8192) == 32
    assert decode_splits(seqs=1, kv_heads=1, max_kv_len=8192) == 32
    assert decode_splits(seqs=1, kv_heads=8, max_kv_len=256) == 4
    assert decode_splits(seqs=1, kv_heads=8, max_kv_len=64) == 1


@pytest.mark.parametrize(
    ("seqs", "kv_heads", "expected"),
    [(1, 8, 2), (4, 8, 2), (8, 8, 4), (16, 8, 4), (31, 8, 4), (32, 8, 2), (32, 32, 4)],
)
def test_decode_warps(seqs, kv_heads, expected):
    config = decode_config(seqs=seqs, kv_heads=kv_heads, max_kv_len=4096)
    assert config.num_warps == expected


of_64 = functools.partial(DecodeConfig, block_kv=64, splits=1)


@pytest.mark.parametrize(
    ("seqs", "kv_heads", "capability", "expected"),
    [
        # One program a multiprocessor, two, four and eight.
        (16, 8, 9.0, DecodeConfig(block_kv=128, splits=1, totals_late=True)),
        (32, 8, 9.0, of_64(num_warps=2, totals_late=True)),
        (64, 8, 9.0, of_64(num_warps=2, num_stages=4, totals_late=True)),
        (128, 8, 9.0, of_64(num_warps=2, totals_late=True)),
        # A head's queries alone: two warps where all run at once.
        (4, 32, 9.0, of_64(splits=2)),
        (8, 32, 9.0, of_64(num_warps=2, totals_late=True)),
        (16, 32, 9.0, of_64(num_stages=4, totals_late=True)),
        (32, 32, 9.0, of_64()),
        # Of more than one a multiprocessor some would wait for another to end.
        (17, 8, 9.0, of_64(splits=2)),
        (31, 8, 9.0, of_64(splits=2)),
        # Of less shared memory (an L4, an A100) none takes more.
        (16, 8, 8.9, of_64(splits=2)),
        (16, 8, 8.0, of_64(splits=2)),
        (64, 8, 8.0, of_64(num_warps=2, totals_late=True)),
    ],
)
def test_decode_configs(seqs, kv_heads, capability, expected, monkeypatch):
    monkeypatch.setattr(_dispatch, "_compute_capability", lambda: capability)
    actual = decode_config(seqs=seqs, kv_heads=kv_heads, max_kv_len=4096)
    assert actual == expected


def test_prefill_tiles_follow_the_longest_query():
    config = functools.partial(
        _attention_prefill.default_config, group=4, head_dim=128, itemsize=2
    )
    assert config(max_query_len=5).block_rows == 8
    assert config(max_query_len=2).block_rows == 4
    assert config(max_query_len=8191).block_rows == config(max_query_len=64).block_rows
    assert config(max_query_len=8191).block_rows == 16
    assert config(max_query_len=8192, head_dim=256).block_rows == 16
    assert config(max_query_len=8192, group=1).block_rows == 64


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
    "kv_pages": ((2, 5, 2, 16, 16), "float32"),
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
            {"kv_pages": ((5, 2, 16, 16), "float32")},
            "kv_pages must be [2, pages, kv_heads, page_size, head_dim], none of them "
            "0, got shape (5, 2, 16, 16)",
        ),
        (
            {"kv_pages": ((3, 5, 2, 16, 16), "float32")},
            "kv_pages must be keys and values, 2 parts, got shape (3, 5, 2, 16, 16)",
        ),
        (
            {"page_table": ((3,), "int32")},
            "page_table must be [seqs, pages_per_seq], none of them 0, got shape (3,)",
        ),
        (
            {"q": ((4, 6, 8), "float32")},
            "kv_pages must have q's head_dim 8, got shape (2, 5, 2, 16, 16)",
        ),
        (
            {"bounds": ((3,), "int32")},
            "bounds must have shape (4,) (page_table (3, 2)), got (3,)",
        ),
        (
            {"kv_lens": ((4,), "int32")},
            "kv_lens must have shape (3,) (page_table (3, 2)), got (4,)",
        ),
        (
            {"q": ((4, 6, 16), "int32")},
            "q must be one of float32, bfloat16, float16, got int32",
        ),
        (
            {"kv_pages": ((2, 5, 2, 16, 16), "bfloat16")},
            "kv_pages must be float32, got bfloat16",
        ),
        ({"bounds": ((4,), "uint32")}, "bounds must be int32, got uint32"),
        (
            {"q": ((4, 5, 16), "float32")},
            "heads must be a multiple of kv_heads, got 5 heads and 2 kv_heads",
        ),
        (
            {
                "q": ((4, 6, 12), "float32"),
                "kv_pages": ((2, 5, 2, 16, 12), "float32"),
            },
            "head_dim must be a multiple of 8 and at most 256, got 12",
        ),
        (
            {"kv_pages": ((2, 5, 2, 48, 16), "float32")},
            "page_size must be a power of two and at least 16, got 48",
        ),
        ({"max_query_len": 0}, "max_query_len must be an integer of at least 1, got 0"),
        ({"max_query_len": 1.5}, "max_query_len must be an integer of at least 1, got"),
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
