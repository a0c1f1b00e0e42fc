"""Few rows' products by warp groups: what is cut how, and on a GPU their bits."""

import collections
import dataclasses
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from punica_jax.pallas_kernels import (
    LoraPool,
    NormedRows,
    _one_launch,
    _project,
    _project_warpgroups,
    _shrink_pieces,
    lora_gated,
    lora_linear,
    segment_metadata,
)
from punica_jax.pallas_kernels._dispatch import multiprocessors
from punica_jax.pallas_kernels._pool import RANK_PAGE
from punica_jax.pallas_kernels._project_cut import ProjectCut
from punica_jax.pallas_kernels._shrink_cut import ShrinkCut
from punica_jax.pallas_kernels._warpgroups import ALIGNED_ROWS
from punica_jax.pallas_kernels.shapes import MODEL_SHAPES
from tests.attention_cases import assert_same
from tests.sgmv_cases import make_case
from tests.warpgroup_cases import H200, HOPPER, in_second_layer

NUM_SLOTS = 6
# A slot's ranks; pages of 16.
RANKS = [[16, 16, 16], [7, 0, 1], [0, 16, 3], [64, 40, 17], [3, 33, 50], [48, 16, 2]]


def operands_of(rows, d_in, d_out, dtype="bfloat16", options=(), num_parts=4):
    """Return x, a weight, and some of `bias`, `residual` and a norm; random."""
    rng = np.random.default_rng(rows + d_in + d_out)

    def draw(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    x, weight = draw(rows, d_in), draw(d_out, d_in, scale=d_in**-0.5)
    if "squares" in options:
        squares = rng.uniform(0.1, 3, (num_parts, rows)) * d_in / num_parts
        squares = np.float32(squares)
        x = NormedRows(x=x, squares=jnp.asarray(squares), eps=1e-5)
    values = {"bias": draw(d_out), "residual": draw(rows, d_out)}
    return x, weight, {name: values[name] for name in options if name != "squares"}


def lora_of(rows, d_in, d_outs, dtype="bfloat16", *, ranks=RANKS, slots=None):
    """Return adapters of up to three modules, and the rows that use them."""
    ranks = [own[: len(d_outs)] for own in ranks]
    case = make_case(rows=rows, ranks=ranks, d_in=d_in, d_outs=d_outs, dtype=dtype)
    if slots is None:
        slots = np.random.default_rng(rows).integers(-1, len(ranks), rows)
    return case.pool, segments_of(slots, len(ranks))


def segments_of(slots, num_slots=NUM_SLOTS):
    return segment_metadata(jnp.asarray(slots, jnp.int32)[:, None], num_slots=num_slots)


def written(pool, segments):
    """Return which of v's values are written, `bool[rows, C * max_rank]`."""
    slots = np.asarray(segments.slots[0])
    ranks = np.arange(pool.max_rank)
    pages = np.asarray(pool.num_pages)[slots]
    used = ranks < RANK_PAGE * pages[:, :, None]
    return (used & (slots >= 0)[:, None, None]).reshape(len(slots), -1)


@pytest.fixture
def by_triton(monkeypatch):
    """Return what launches Triton's form, and how the other one is called."""

    def run(launch, *operands, **options):
        with monkeypatch.context() as patch:
            patch.setattr(_project_warpgroups, "fits", lambda *_, **__: False)
            return jax.jit(functools.partial(launch, **options))(*operands)

    return run


def assert_bits_of_triton(by_triton, x, weight, lora=None, there=None, **options):
    assert _project_warpgroups.fits(x, weight, lora, options)
    y, v = jax.jit(functools.partial(_project.project, **options))(x, weight, lora)
    expected, expected_v = by_triton(_project.project, x, weight, lora, **options)
    assert_same(y, expected)
    if lora is None:
        assert v is None
        return
    assert_same_sums(v, expected_v, written(*lora) if there is None else there)


def assert_same_sums(v, expected, there):
    """Assert that a shrink's sums are the same where there are any."""
    for own, other in zip(v, expected, strict=True):
        assert_same(np.asarray(own)[there], np.asarray(other)[there])


@pytest.mark.gpu
@HOPPER
class TestBits:
    """They are those of Triton's form, of every row."""

    @pytest.fixture(autouse=True)
    def of_up_to_64_rows(self, monkeypatch):
        monkeypatch.setattr(_project_warpgroups, "_MAX_ROWS_ALONE", 64)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize(
        ("rows", "d_in", "d_outs"),
        [
            (16, 128, (512,)),
            (24, 1280, (1000, 24)),
            (32, 4096, (4096,)),
            (32, 4096, (4096, 1024, 1024)),
            (64, 640, (3000, 3000)),
            (32, 512, (11008, 11008)),
            (40, 256, (14336, 14336)),
            (8, 256, (14336, 14336)),
            (16, 256, (16000, 16000)),
            (32, 14336, (4096,)),
            (64, 5760, (2048,)),  # an odd number of blocks, a shorter group
        ],
    )
    def test_shapes(self, rows, d_in, d_outs, dtype, by_triton):
        x, weight, _ = operands_of(rows, d_in, sum(d_outs), dtype)
        lora = lora_of(rows, d_in, d_outs, dtype)
        assert_bits_of_triton(by_triton, x, weight, lora)
        if rows > 8:
            assert_bits_of_triton(by_triton, x, weight)

    @pytest.mark.parametrize("d_outs", [(4096,), (14336, 14336)])
    @pytest.mark.parametrize(
        "options",
        [
            ("bias",),
            ("residual",),
            ("bias", "residual"),
            ("squares",),
        ],
        ids="+".join,
    )
    @pytest.mark.parametrize("rows", [32, 40, 64])
    def test_options(self, rows, options, d_outs, by_triton):
        x, weight, others = operands_of(rows, 640, sum(d_outs), options=options)
        lora = lora_of(rows, 640, d_outs)
        assert_bits_of_triton(by_triton, x, weight, lora, **others)
        assert_bits_of_triton(by_triton, x, weight, **others)

    @pytest.mark.parametrize("num_parts", [1, 7, 12, 28, 32, 33])
    @pytest.mark.parametrize("rows", [32, 64])
    def test_norms(self, rows, num_parts, by_triton):
        x, weight, _ = operands_of(
            rows, 640, 3072, options=("squares",), num_parts=num_parts
        )
        lora = lora_of(rows, 640, (1024, 1024, 1024))
        assert_bits_of_triton(by_triton, x, weight, lora)
        assert_bits_of_triton(by_triton, x, weight)

    @pytest.mark.parametrize(
        ("rows", "counts"),
        [(32, (1, 7, 8, 15, 16, 20, 24)), (64, (33, 40, 47, 48, 56, 63))],
    )
    def test_a_row_alone_and_among_others(self, rows, counts):
        d_outs, slots = (14336, 14336), np.arange(rows) % (NUM_SLOTS + 1) - 1
        x, weight, _ = operands_of(rows, 256, sum(d_outs), options=("squares",))
        pool, _ = lora_of(rows, 256, d_outs)

        def first_row(count):
            rows = NormedRows(x=x.x[:count], squares=x.squares[:, :count], eps=x.eps)
            segments = segments_of(slots[::-1][:count])
            y, v = jax.jit(_project.project)(rows, weight, (pool, segments))
            [entry] = np.flatnonzero(np.asarray(segments.rows[0])[:count] == 0)
            there = written(pool, segments)[entry]
            return y[0], np.asarray(v)[:, entry, there]

        together, ranks = first_row(rows)
        for count in counts:
            alone, own = first_row(count)
            assert_same(alone, together)
            assert_same(own, ranks)

    @pytest.mark.parametrize(
        "slots",
        [
            np.full(64, -1),
            np.zeros(64),
            np.arange(64) % (NUM_SLOTS + 1) - 1,
            np.where(np.arange(64) < 40, 3, 4),
            np.where(np.arange(64) < 21, np.arange(64) % 3, 3),
            np.where(np.arange(64) == 63, 5, -1),
        ],
        ids=["idle", "one", "in turn", "several tiles", "a prompt", "last"],
    )
    @pytest.mark.parametrize("modules", [1, 2, 3])
    def test_slots(self, slots, modules, by_triton):
        d_outs = (1024,) * modules
        x, weight, _ = operands_of(64, 4096, sum(d_outs))
        lora = lora_of(64, 4096, d_outs, slots=slots)
        assert_bits_of_triton(by_triton, x, weight, lora)

    @pytest.mark.parametrize(("d_in", "modules"), [(5760, 1), (5760, 3), (14336, 1)])
    def test_several_pieces_of_a_program(self, d_in, modules, by_triton):
        """An adapter a row, of one page and of four in turn."""
        ranks = [[(16, 64)[slot % 2]] * modules for slot in range(64)]
        d_outs = (512,) * modules
        x, weight, _ = operands_of(64, d_in, sum(d_outs))
        lora = lora_of(64, d_in, d_outs, ranks=ranks, slots=np.arange(64))
        cut = ProjectCut.of(x, weight, lora, gated=False)
        assert cut.pieces.total > multiprocessors()
        assert_bits_of_triton(by_triton, x, weight, lora)

    def test_single_pages(self, by_triton):
        x, weight, _ = operands_of(32, 4096, 1024)
        lora = lora_of(32, 4096, (512, 512), ranks=[[16, 16], [3, 0], [0, 9]] * 2)
        assert lora[0].max_rank == RANK_PAGE
        assert_bits_of_triton(by_triton, x, weight, lora)

    @pytest.mark.parametrize("max_rank", [32, 48])
    @pytest.mark.parametrize("modules", [1, 2, 3])
    def test_fewer_pages(self, max_rank, modules, by_triton):
        d_outs = (1024,) * modules
        x, weight, _ = operands_of(32, 4096, sum(d_outs))
        ranks = [[min(rank, max_rank) for rank in own] for own in RANKS]
        lora = lora_of(32, 4096, d_outs, ranks=ranks)
        assert lora[0].max_rank == max_rank
        assert_bits_of_triton(by_triton, x, weight, lora)

    def test_another_layer(self, by_triton):
        x, weight, _ = operands_of(32, 256, 1024)
        pool, segments = lora_of(32, 256, (512, 512))
        layered = in_second_layer(pool, first_count=1)
        there = written(pool, segments)
        assert_bits_of_triton(by_triton, x, weight, (layered, segments), there)

    @pytest.mark.parametrize("options", [(), ("squares",), ("residual",)], ids="+".join)
    @pytest.mark.parametrize("rows", [16, 24, 32, 40, 64])
    def test_nan_stays_in_its_rows(self, rows, options):
        x, weight, others = operands_of(rows, 256, 1024, options=options)
        slots = np.arange(rows) % NUM_SLOTS
        pool, segments = lora_of(rows, 256, (1024,), slots=slots)
        assert _project_warpgroups.fits(x, weight, (pool, segments), others)
        run = jax.jit(functools.partial(_project.project, **others))
        clean_y, clean = run(x, weight, (pool, segments))
        bad = pool.a.at[np.asarray(pool.page_table[3, :4])].set(jnp.nan)
        pool = dataclasses.replace(pool, a=bad)
        if isinstance(x, NormedRows):
            x = dataclasses.replace(x, x=x.x.at[7].set(jnp.nan))
        else:
            x = x.at[7].set(jnp.nan)
        y, v = run(x, weight, (pool, segments))
        fine = np.arange(rows) != 7
        assert_same(y[fine], clean_y[fine])
        assert np.isnan(np.asarray(y[7], np.float32)).all()
        entries = np.asarray(segments.rows[0])
        there = written(pool, segments)
        own = (slots[entries] != 3) & (entries != 7)
        assert_same(
            np.asarray(v)[:, own][:, there[own]],
            np.asarray(clean)[:, own][:, there[own]],
        )
        assert np.isnan(np.asarray(v)[:, ~own][:, there[~own]]).all()

    @pytest.mark.parametrize(
        "options", [(), ("squares",), ("bias", "residual")], ids=str
    )
    @pytest.mark.parametrize(
        ("rows", "d_in", "width"),
        [(16, 128, 128), (32, 4096, 14336), (64, 384, 5500 * 2), (24, 256, 16000)],
    )
    def test_gated(self, rows, d_in, width, options, by_triton):
        x, weight, others = operands_of(rows, d_in, 2 * width, options=options)
        assert _project_warpgroups.fits(x, weight, None, others, gated=True)
        actual = jax.jit(functools.partial(_one_launch.gated, **others))(x, weight)
        assert_same(actual, by_triton(_one_launch.gated, x, weight, **others))


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def pool_struct(d_in, d_outs, max_pages):
    """Return the shapes of some adapters' pool."""
    return LoraPool(
        a=struct(9, len(d_outs), RANK_PAGE, d_in),
        b=struct(9, RANK_PAGE, sum(d_outs)),
        page_table=struct(NUM_SLOTS, max_pages, dtype="int32"),
        num_pages=struct(NUM_SLOTS, len(d_outs), dtype="int32"),
        d_outs=d_outs,
    )


@hypothesis.given(
    rows=st.integers(1, 8).map(lambda n: 8 * n),
    d_in=st.integers(1, 64).map(lambda n: 128 * n),
    d_out=st.integers(16, 3600).map(lambda n: 16 * n),
    gated=st.booleans(),
)
@hypothesis.settings(max_examples=200)
def test_programs_cover_all_columns_within_their_memory(rows, d_in, d_out, gated):
    x, weight = struct(rows, d_in), struct(d_out, d_in)
    cut = ProjectCut.of(x, weight, None, gated=gated)
    assert d_in % cut.rows.block_k == 0
    covered = np.zeros(d_out, int)
    assert cut.num_tiles <= 256
    for part in range(cut.num_parts):
        # Of all programs at once, and more: each number of them would be compiled.
        columns = cut.part(jnp.arange(256), part)
        for start in np.asarray(columns.start)[: cut.num_tiles]:
            assert start % 8 == 0
            assert 0 <= start <= d_out - columns.size
            covered[start:][: columns.size] += 1
    assert covered.all()
    # Those of the last program but one, at most, are computed twice.
    assert (covered > 1).sum() < cut.num_parts * cut.part_n
    # A wave of programs, or another form.
    assert cut.num_tiles <= 132 or not cut.fits
    assert bytes_of(cut.memory(jnp.dtype("bfloat16"))) <= 225 * 1024


@pytest.mark.parametrize("rows", [16, 32, 40, 48, 56, 64])
@pytest.mark.parametrize("max_pages", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", MODEL_SHAPES.values(), ids=lambda shape: shape.name)
def test_pieces_have_their_share_of_the_memory(rows, max_pages, shape):
    hidden, heads = shape.hidden_size, (shape.num_heads, *[shape.num_kv_heads] * 2)
    layers = [
        (hidden, tuple(count * shape.head_dim for count in heads)),
        (hidden, (hidden,)),
        (hidden, (shape.intermediate_size,) * 2),
        (shape.intermediate_size, (hidden,)),
    ]
    segments = segments_of(np.zeros(rows))
    for d_in, d_outs in layers:
        x, weight = struct(rows, d_in), struct(sum(d_outs), d_in)
        x = NormedRows(x=x, squares=struct(32, rows, dtype="float32"), eps=1e-5)
        pool = pool_struct(d_in, d_outs, max_pages)
        cut = ProjectCut.of(x, weight, (pool, segments), gated=False)
        assert cut.fits
        pieces = cut.pieces.memory(jnp.dtype("bfloat16"))
        assert bytes_of(pieces) == cut.pieces.num_bytes(2)
        memory = jax.tree.leaves((cut.memory(jnp.dtype("bfloat16")), pieces))
        # Each array and barrier at a multiple of its own.
        taken = sum(-bytes_of(own) // -1024 * 1024 or 256 for own in memory)
        assert taken <= 227 * 1024


@pytest.mark.parametrize(
    ("rows", "d_out"),
    [
        *((32, d_out) for d_out in (6144, 10240, 10256, 14336, 14352)),
        *((64, d_out) for d_out in (6144, 10240, 10256)),
    ],
)
def test_widths_that_fit_with_adapters(rows, d_out, monkeypatch):
    monkeypatch.setattr(_project_warpgroups, "has_warpgroups", lambda: True)
    x, weight = struct(rows, 4096), struct(d_out, 4096)
    lora = pool_struct(4096, (d_out,), 4), segments_of(np.zeros(rows))
    assert _project_warpgroups.fits(x, weight, lora, {})
    assert _project_warpgroups.fits(x, weight, None, {}) == (rows == 32)


def bytes_of(memory):
    own = jax.tree.leaves(memory)
    arrays = [array for array in own if not isinstance(array, plgpu.Barrier)]
    return sum(int(np.prod(a.shape)) * jnp.dtype(a.dtype).itemsize for a in arrays)


MOST_PIECES = 4096


@hypothesis.given(
    slots=st.lists(st.integers(-1, NUM_SLOTS - 1), min_size=1, max_size=64),
    modules=st.integers(1, 3),
    max_pages=st.integers(1, 4),
    d_in=st.sampled_from([128, 1280, 4096, 14336]),
    num_programs=st.sampled_from([7, 132]),
)
@hypothesis.settings(max_examples=60)
def test_each_page_of_an_adapter_is_of_one_piece(
    slots, modules, max_pages, d_in, num_programs
):
    rng = np.random.default_rng(len(slots))
    # As `fits` has it, and few sizes to compile for.
    segments = segments_of(slots + [-1] * (-len(slots) % ALIGNED_ROWS))
    rows, of_rows = np.asarray(segments.rows[0]), np.asarray(slots)
    table = rng.permutation(NUM_SLOTS * max_pages).reshape(NUM_SLOTS, max_pages)
    counts = rng.integers(0, max_pages + 1, (2 * NUM_SLOTS, modules))
    pool = dataclasses.replace(
        make_case(rows=1, ranks=[[1] * modules], d_in=16, d_outs=(16,) * modules).pool,
        a=np.zeros((2 * NUM_SLOTS * max_pages, modules, RANK_PAGE, d_in), jnp.bfloat16),
        page_table=table.astype(np.int32),
        num_pages=counts.astype(np.int32),
        layer=np.ones(1, np.int32),
    )
    pieces = ShrinkCut.of(pool, segments)
    a, *tables = _shrink_pieces.operands(pool, segments)
    tables = list(map(jnp.asarray, tables))
    num_turns = -(-pieces.total // num_programs)
    assert num_turns * num_programs <= MOST_PIECES
    look_up = functools.partial(
        _shrink_pieces._look_up, a_ref=a, tables=tables, pieces=pieces
    )
    # Of more than there are, at once: each number of them would be compiled.
    lists, form = jax.tree.flatten(jax.vmap(look_up)(jnp.arange(MOST_PIECES)))
    values_of = zip(*(values.tolist() for values in lists), strict=True)
    found = collections.Counter()
    for values in itertools.islice(values_of, num_turns * num_programs):
        piece = form.unflatten(values)
        assert 0 <= piece.num_pages <= pieces.pages
        if not piece.num_pages:
            continue
        own = rows[piece.begin : piece.end]
        slot = of_rows[own[0]]
        assert own.tolist() == np.flatnonzero(of_rows == slot).tolist()
        for page in range(piece.num_pages):
            there = tuple(page < count for count in piece.counts)
            at = slot, piece.index + page, piece.a_rows[page], piece.group
            found[*at, there] += 1
    page_ranks, first_page = modules * RANK_PAGE, NUM_SLOTS * max_pages
    expected = collections.Counter(
        (slot, page, a_row, group, there)
        for slot in set(slots) - {-1}
        for page in range(counts[NUM_SLOTS + slot].max())
        for a_row in [(first_page + table[slot, page]) * page_ranks]
        for there in [tuple(bool(page < own) for own in counts[NUM_SLOTS + slot])]
        for group in range(pieces.config.num_groups)
    )
    assert found == expected


@HOPPER
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"lora": False}, True),
        ({"options": ("bias", "residual")}, True),
        ({"options": ("squares",)}, True),
        ({"options": ("squares",), "parts": 12}, True),
        # Scaled and then added to: a compiler may round that once, or twice.
        ({"options": ("squares", "bias")}, False),
        ({"options": ("squares", "residual")}, False),
        ({"rows": 16}, True),
        ({"rows": 64}, True),
        ({"rows": 64, "lora": False}, False),
        ({"rows": 40, "lora": False}, False),
        ({"rows": 8}, False),
        ({"rows": 20}, False),
        ({"rows": 65}, False),
        ({"rows": 72}, False),
        ({"width": 20000}, False),  # of more columns than a wave of programs has
        ({"d_in": 192}, False),
        ({"dtype": "float32"}, False),
        ({"rank": 65}, False),
        ({"implementation": "xla"}, False),
        # Of a wide weight eight are enough.
        ({"rows": 8, "width": 14336}, True),
        ({"rows": 4, "width": 14336}, False),
        ({"rows": 8, "width": 14336, "lora": False}, False),
    ],
    ids=str,
)
def test_what_it_lacks_goes_elsewhere(change, expected):
    rows, d_in, width = (
        change.get(name, default)
        for name, default in (("rows", 32), ("d_in", 256), ("width", 512))
    )
    dtype = change.get("dtype", "bfloat16")
    options = change.get("options", ())
    parts = change.get("parts", 4)
    x, weight, others = operands_of(rows, d_in, 2 * width, dtype, options, parts)
    lora = None
    if change.get("lora", True):
        ranks = [[change.get("rank", 16)] * 2] * NUM_SLOTS
        lora = lora_of(rows, d_in, (width, width), dtype, ranks=ranks)
    others["implementation"] = change.get("implementation", "pallas_triton")
    for launch in lora_linear, lora_gated:
        with jax.sharding.use_abstract_mesh(H200):
            traced = jax.jit(lambda x, f=launch: f(x, weight, lora, **others)).trace(x)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ("@mosaic_gpu" in text) == expected
