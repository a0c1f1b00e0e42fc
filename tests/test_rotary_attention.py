"""Decode attention that expands its own q, k and v: the bits of the launches apart."""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.pallas_kernels import (
    RANK_PAGE,
    LoraPool,
    NormedRows,
    Segments,
    _attention_decode,
    _rotary,
    _rotary_attention,
    _row_expand,
    lora_attention,
    lora_rotary,
    paged_attention,
    segment_metadata,
)
from punica_jax.pallas_kernels._attention_decode import decode_attention
from punica_jax.pallas_kernels._decode_config import DecodeConfig, config_of
from punica_jax.pallas_kernels._fused import Shrunk
from punica_jax.pallas_kernels._rotary_attention import fits, rotary_attention
from tests.attention_cases import NOWHERE, assert_same, make_batch
from tests.sgmv_cases import make_case, rarely
from tests.warpgroup_cases import H200, in_second_layer

PAGE_SIZE = 16
SMALL = DecodeConfig(block_kv=16, splits=1)
SPLIT = DecodeConfig(block_kv=16, splits=4)
# Sequences that end with a page, and begin one; two have nothing to do.
LENS = [1, 0, 16, 33, 17, 0, 90]


class Layer(NamedTuple):
    """What follows q, k and v's base product in a step that decodes."""

    y: jax.Array
    v: jax.Array
    pool: LoraPool
    segments: Segments
    rotary: tuple[jax.Array, jax.Array]
    kv_pages: jax.Array
    page: jax.Array
    offset: jax.Array
    sequences: tuple[jax.Array, jax.Array, jax.Array]

    @property
    def shrunk(self):
        return Shrunk(self.v, self.pool, self.segments)

    @property
    def cache(self):
        return self.rotary, self.kv_pages, self.page, self.offset


def make_layer(
    *,
    heads=2,
    head_dim=64,
    lens=LENS,
    max_pages=1,
    padding=0,
    dtype="bfloat16",
    page_size=PAGE_SIZE,
    spare_pages=1,
    seed=0,
):
    """Make one of adapters with every number of pages, and NaN where nothing is."""
    live = [int(length > 0) for length in lens]
    shape: dict[str, Any] = {"heads": heads, "kv_heads": heads, "head_dim": head_dim}
    batch = make_batch(
        live,
        lens,
        **shape,
        page_size=page_size,
        dtype=dtype,
        padding=padding,
        spare_pages=spare_pages,
        seed=seed,
    )
    operands = batch.operands(fill=np.nan, table_fill=NOWHERE)
    q, kv_pages, *sequences = operands
    table, bounds, _ = map(np.asarray, sequences)
    rows, num_pages = q.shape[0], kv_pages.shape[1]
    page = (num_pages + np.arange(rows)).astype(np.int32)
    offset = np.zeros(rows, np.int32)
    pages = np.array(kv_pages)
    for seq, length in enumerate(lens):
        if length:
            token = length - 1
            row, own = bounds[seq], table[seq, token // page_size]
            page[row], offset[row] = own, token % page_size
            pages[:, own, :, token % page_size] = np.nan  # not written yet
    width = heads * head_dim
    ranks = [
        [RANK_PAGE * ((count + module) % (max_pages + 1)) for module in range(3)]
        for count in range(max_pages + 1)
    ]
    options: dict[str, Any] = {"d_in": 16, "d_outs": (width,) * 3, "dtype": dtype}
    case = make_case(rows=rows, ranks=ranks, **options)
    rng = np.random.default_rng(seed + 1)
    slots = jnp.asarray(rng.integers(-1, len(ranks), rows), jnp.int32)
    segments = segment_metadata(slots, num_slots=len(ranks), implementation="xla")
    v = rng.standard_normal((3, rows, 3, max_pages, RANK_PAGE)).astype(np.float32)
    counts = np.asarray(case.pool.num_pages)
    for entry, slot in enumerate(np.asarray(segments.slots[0])):
        for module in range(3):
            v[:, entry, module, counts[slot, module] if slot >= 0 else 0 :] = np.nan
    angle = rng.uniform(0, 6, (rows, head_dim // 2))
    angle = np.concatenate([angle, angle], axis=1)
    rotary = jnp.asarray(np.cos(angle), dtype), jnp.asarray(np.sin(angle), dtype)
    return Layer(
        jnp.asarray(case.y),
        jnp.asarray(v.reshape(3, rows, -1)),
        case.pool,
        segments,
        rotary,
        jnp.asarray(pages),
        jnp.asarray(page),
        jnp.asarray(offset),
        tuple(sequences),
    )


def one_launch(layer, config=None, *, interpret):
    return rotary_attention(
        *(layer.y, layer.shrunk, *layer.cache, *layer.sequences),
        scale=0.125,
        config=config,
        interpret=interpret,
    )


def launches_apart(layer, config=None, *, interpret):
    q, pages = _row_expand.rotary_expand(
        layer.y, layer.shrunk, *layer.cache, interpret=interpret
    )
    options = {"scale": 0.125, "config": config, "interpret": interpret}
    return decode_attention(q, pages, *layer.sequences, **options), pages


def check_bits(layer, config=None, *, interpret):
    own, others = (
        jax.jit(functools.partial(run, config=config, interpret=interpret))(layer)
        for run in (one_launch, launches_apart)
    )
    for one, other in zip(own, others, strict=True):
        assert_same(one, np.asarray(other))
    return own


class RotaryTests:
    """What one launch must do on every device."""

    interpret: bool

    @pytest.mark.parametrize("config", [SMALL, SPLIT])
    @pytest.mark.parametrize(
        ("heads", "head_dim", "max_pages", "dtype"),
        [
            (2, 64, 1, "bfloat16"),
            (3, 128, 3, "bfloat16"),
            rarely(1, 64, 4, "float16"),
            rarely(1, 256, 1, "bfloat16"),
        ],
    )
    def test_bits_are_those_of_two_launches(
        self, heads, head_dim, max_pages, dtype, config
    ):
        layer = make_layer(
            heads=heads, head_dim=head_dim, max_pages=max_pages, dtype=dtype, padding=2
        )
        out, pages = check_bits(layer, config, interpret=self.interpret)
        assert np.isfinite(np.asarray(out, np.float32)).all()
        page, offset = (np.asarray(own)[: sum(map(bool, LENS))] for own in layer[6:8])
        new = np.asarray(pages, np.float32)[:, page, :, offset]
        assert np.isfinite(new).all()
        assert not np.asarray(out)[-2:].any(), "padding rows are zeros"

    @pytest.mark.parametrize("config", [SMALL, SPLIT])
    def test_an_order_of_programs_changes_no_bit(self, config, monkeypatch):
        layer = make_layer(max_pages=2, padding=1)
        run = functools.partial(one_launch, config=config, interpret=self.interpret)
        expected, pages = jax.jit(run)(layer)
        monkeypatch.setattr(_attention_decode, "AT_ONCE", 1)
        own = jax.jit(lambda layer: run(layer))(layer)
        for one, other in zip(own, (expected, pages), strict=True):
            assert_same(one, np.asarray(other))

    @pytest.mark.parametrize(
        ("config", "page_size"),
        [
            (DecodeConfig(block_kv=16, splits=4), 64),
            (DecodeConfig(block_kv=64, splits=1, num_warps=2, totals_late=True), 16),
        ],
    )
    def test_pages_wider_than_blocks_and_narrower(self, config, page_size):
        lens = [15, 16, 17, 31, 32, 48, 64, 65]
        layer = make_layer(lens=lens, page_size=page_size, max_pages=2)
        out, _ = check_bits(layer, config, interpret=self.interpret)
        assert np.isfinite(np.asarray(out, np.float32)).all()

    def test_a_layer_among_others_and_rows_with_weights(self):
        layer = make_layer(max_pages=2)
        among = layer._replace(pool=in_second_layer(layer.pool, first_count=7))
        rng = np.random.default_rng(7)
        weights = rng.uniform(0, 2, layer.segments.rows.shape).astype(np.float32)
        segments = dataclasses.replace(layer.segments, weights=jnp.asarray(weights))
        run = functools.partial(one_launch, config=SMALL, interpret=self.interpret)
        plain, own = (np.asarray(jax.jit(run)(each)[0]) for each in (layer, among))
        assert_same(own, plain)
        weighted = layer._replace(segments=segments)
        own, _ = check_bits(weighted, SMALL, interpret=self.interpret)
        assert not np.array_equal(own, plain)

    def test_a_row_without_a_page_stores_nothing(self):
        layer = make_layer()
        nowhere = layer._replace(page=layer.page.at[2].set(layer.kv_pages.shape[1] + 7))
        run = functools.partial(one_launch, config=SMALL, interpret=self.interpret)
        pages = np.asarray(jax.jit(run)(nowhere)[1], np.float32)
        expected = np.array(jax.jit(run)(layer)[1], np.float32)
        expected[:, layer.page[2], :, layer.offset[2]] = np.nan
        np.testing.assert_array_equal(pages, expected)

    def test_neighbours_change_no_bit(self):
        layer = make_layer(max_pages=2)
        other = make_layer(max_pages=2, seed=5)
        row, seq = 2, 3
        own = np.asarray(layer.sequences[0])[seq, : -(-LENS[seq] // PAGE_SIZE)]
        theirs = np.asarray(other.sequences[0])[seq, : own.size]
        slots = np.asarray(other.segments.slots[0])
        slots = slots[np.argsort(np.asarray(other.segments.rows[0]))]
        place = np.argsort(np.asarray(layer.segments.rows[0]))[row]
        slots[row] = layer.segments.slots[0, place]
        segments = segment_metadata(
            jnp.asarray(slots),
            num_slots=layer.pool.num_slots,
            implementation="xla",
        )
        entry = np.argsort(np.asarray(segments.rows[0]))[row]
        other = other._replace(
            y=other.y.at[row].set(layer.y[row]),
            v=other.v.at[:, entry].set(layer.v[:, place]),
            pool=layer.pool,
            segments=segments,
            rotary=tuple(
                mine.at[row].set(one[row])
                for mine, one in zip(other.rotary, layer.rotary, strict=True)
            ),
            kv_pages=other.kv_pages.at[:, theirs].set(layer.kv_pages[:, own]),
        )
        for config in (SMALL, SPLIT):
            run = functools.partial(one_launch, config=config, interpret=self.interpret)
            expected, actual = (
                np.asarray(jax.jit(run)(each)[0]) for each in (layer, other)
            )
            assert_same(actual[row], expected[row])
            assert not np.array_equal(actual[0], expected[0])


class TestInterpret(RotaryTests):
    interpret = True


@pytest.mark.gpu
class TestTriton(RotaryTests):
    interpret = False

    @pytest.mark.parametrize("max_pages", [1, 4])
    @pytest.mark.parametrize("rows", [1, 4, 8, 32, 64])
    def test_the_shapes_that_are_served(self, rows, max_pages):
        """Splits, programs of two and of four warps, more programs than run at once."""
        rng = np.random.default_rng(rows)
        lens = rng.integers(1, 700, rows).tolist()
        layer = make_layer(
            heads=32, head_dim=128, lens=lens, max_pages=max_pages, page_size=64
        )
        for _ in range(3):
            check_bits(layer, interpret=False)


def operands_of(*, rows=32, heads=32, kv_heads=32, head_dim=128, max_kv_len=2048):
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    return (
        array((rows, heads, head_dim)),
        array((2, 100, kv_heads, 64, head_dim)),
        jax.ShapeDtypeStruct((rows, max_kv_len // 64), jnp.int32),
    )


def pool_of(max_pages):
    """A pool whose adapters may have so many pages."""
    ranks = [[RANK_PAGE * max_pages] * 3]
    options: dict[str, Any] = {"d_in": 16, "d_outs": (16,) * 3, "dtype": "bfloat16"}
    return make_case(rows=1, ranks=ranks, **options).pool


@pytest.mark.parametrize(
    ("shape", "is_one"),
    [
        ({}, True),
        ({"rows": 1}, True),
        ({"rows": 64, "heads": 40, "kv_heads": 40}, True),
        ({"max_kv_len": 4096, "max_pages": 4}, True),
        ({"head_dim": 64}, False),  # not measured
        ({"max_pages": 5}, False),
        ({"kv_heads": 8}, False),  # heads share keys
        ({"head_dim": 80}, False),  # lanes would have different numbers of columns
        ({"max_kv_len": 8192}, False),  # sequences have parts
    ],
)
def test_which_steps_have_one_launch(shape, is_one):
    shape = {"max_pages": 1} | shape
    pool = pool_of(shape.pop("max_pages"))
    assert fits(*operands_of(**shape), pool) == is_one


def test_layers_share_their_look_ups():
    layer = make_layer()
    segments = layer.segments
    entries = segments.rows[0], segments.slots[0], segments.slots[0]

    @jax.jit
    def two_layers(sequences, entries, place):
        first, second = (
            _rotary_attention._look_up(
                sequences, entries, place, slots=7, is_ordered=True
            )
            for _ in range(2)
        )
        return first * 2 + second

    operands = layer.sequences[1:], entries, (layer.page, layer.offset)
    text = two_layers.lower(*operands).compile().as_text()
    assert len(re.findall(r" sort\(", text)) == 1


@pytest.mark.parametrize(("rows", "num_warps"), [(1, 4), (8, 2), (32, 4)])
def test_programs_of_two_warps_are_among_the_tested(rows, num_warps):
    assert config_of(*operands_of(rows=rows)).num_warps == num_warps


def layer_operands(layer):
    """What the public operation takes, of a layer whose product is nothing."""
    rows, width = layer.y.shape
    x = jnp.asarray(np.random.default_rng(3).standard_normal((rows, 16)), layer.y.dtype)
    weight = jnp.zeros((width, 16), layer.y.dtype)
    pages = jnp.nan_to_num(layer.kv_pages)
    lora = layer.pool, layer.segments
    cache = layer.rotary, pages, layer.page, layer.offset
    return x, weight, cache, layer.sequences, lora, {"bias": layer.y[0]}


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
@pytest.mark.parametrize("has_lora", [True, False])
def test_the_public_operation_is_two(has_lora, implementation):
    layer = make_layer(head_dim=128, max_pages=2, padding=1)
    x, weight, cache, sequences, lora, bias = layer_operands(layer)
    lora = lora if has_lora else None
    own = {"implementation": implementation}

    @jax.jit
    def one():
        return lora_attention(
            x, weight, *cache, *sequences, lora, **bias, max_query_len=1, **own
        )

    @jax.jit
    def two():
        q, pages = lora_rotary(x, weight, *cache, lora, **bias, **own)
        return paged_attention(q, pages, *sequences, max_query_len=1, **own), pages

    for actual, expected in zip(one(), two(), strict=True):
        assert_same(actual, np.asarray(expected))


def launches_of(layer, **options):
    """The names of what a step's layer launches on an H200."""
    x, weight, cache, sequences, lora, bias = layer_operands(layer)

    options = {"max_query_len": 1} | options

    def run(x):
        return lora_attention(
            *(x, weight, *cache, *sequences, lora),
            **bias,
            **options,
            implementation="pallas_triton",
        )

    with jax.sharding.use_abstract_mesh(H200):
        text = jax.jit(run).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    names = re.findall(r'name = "((?:lora|paged)_\w+)"', text)
    return [name for name in names if name != "lora_project"]


def test_a_layer_has_one_launch_less():
    layer = make_layer(head_dim=128)
    last = ["paged_attention_combine"]
    assert launches_of(layer) == ["paged_attention_decode_rotary", *last]
    # Sequences of several rows, of which each program has a tile.
    assert launches_of(layer, max_query_len=2) == [
        "lora_rotary_rows",
        "paged_attention_prefill",
    ]
    many = make_layer(head_dim=128, heads=1, lens=[3] * 65)
    apart = ["lora_rotary_rows", "paged_attention_decode"]
    assert launches_of(many) == ["lora_shrink", *apart]
    assert launches_of(make_layer(head_dim=64)) == [*apart, *last]


def test_a_second_call_outside_of_jit_compiles_nothing(compiles):
    x, weight, cache, sequences, lora, bias = layer_operands(make_layer(head_dim=128))

    def run():
        return lora_attention(
            *(x, weight, *cache, *sequences, lora),
            **bias,
            max_query_len=1,
            implementation="pallas_interpret",
        )

    first = run()
    with compiles:
        second = run()
    assert compiles.count == 0
    for one, other in zip(first, second, strict=True):
        assert_same(one, np.asarray(other))


def test_rows_left_to_divide():
    layer = make_layer(head_dim=128)
    x, weight, cache, sequences, lora, bias = layer_operands(layer)
    weight = weight + jnp.asarray(0.125, weight.dtype)
    squares = jnp.full((1, x.shape[0]), 4.0 * x.shape[1], jnp.float32)
    halves = NormedRows(x=x, squares=squares, eps=0.0)
    own, expected = (
        lora_attention(
            *(rows, weight, *cache, *sequences, lora),
            **bias,
            max_query_len=1,
            implementation="pallas_interpret",
        )[0]
        for rows in (halves, x / 2)
    )
    np.testing.assert_allclose(
        np.asarray(own, np.float32), np.asarray(expected, np.float32), 3e-2, 2e-2
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bounds": jnp.zeros(3, jnp.int32)}, r"bounds must have shape \(8,\)"),
        ({"kv_lens": jnp.zeros(7)}, "kv_lens must be int32, got float32"),
        ({"scale": 0.0}, "scale must be positive and finite, got 0.0"),
        ({"max_query_len": 0}, "max_query_len"),
        ({"page": jnp.zeros(2, jnp.int32)}, r"page must be int32\[5\], got int32\[2\]"),
        ({"weight": jnp.zeros((9, 16))}, r"weight must be \[\(heads \+ 2"),
    ],
)
def test_errors_say_what_was_wrong_before_anything_runs(change, message, monkeypatch):
    layer = make_layer(head_dim=128)
    x, weight, cache, sequences, lora, bias = layer_operands(layer)
    for name in ("project_rows", "plain_linear"):
        monkeypatch.setattr(_rotary, name, None)
    names = ("rotary", "kv_pages", "page", "offset", "page_table", "bounds", "kv_lens")
    good = dict(zip(names, (*cache, *sequences), strict=True)) | bias
    good |= {"weight": weight, "lora": lora, "max_query_len": 1}
    for implementation in ("xla", "pallas_interpret"):
        with pytest.raises(ValueError, match=message):
            lora_attention(x, **(good | change), implementation=implementation)
