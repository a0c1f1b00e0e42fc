"""Linear layers with LoRA and what follows, against the same steps one by one."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.pallas_kernels import (
    RANK_PAGE,
    Norm,
    _fused,
    _project,
    _row_expand,
    _sgmv_config,
    _shrink,
    lora_gated,
    lora_linear,
    lora_normed,
    lora_rotary,
    reference,
    rms_norm,
    segment_metadata,
)
from punica_jax.pallas_kernels._project_config import project_config
from punica_jax.pallas_kernels._sgmv_config import (
    MAX_PROJECT_ROWS,
    group_size,
    shrink_config,
)
from punica_jax.pallas_kernels._shrink import shrink
from tests.sgmv_cases import TOLERANCE, make_case, slots_of
from tests.warpgroup_cases import in_second_layer

GPU = pytest.param("pallas_triton", marks=pytest.mark.gpu)
GRID = pytest.param("pallas_interpret", marks=pytest.mark.grid)
FORMS = ("gated", "rotary", "linear")
WIDTH = 72  # of gate and of up: no power of two
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 24, 16
# Modules without an adapter, of one page and of several.
RANKS = [[16, 16], [8, 40], [0, 16], [16, 0], [5, 3]]
ROWS = 21
MANY = 40  # too many for programs of one row
TILED = _row_expand._MAX_ROWS + 6  # too many for programs of a few rows


def gated_case(dtype, max_rank=None, rows=ROWS):
    return make_case(
        rows=rows,
        ranks=RANKS if max_rank is None else [[16, 16]] * 5,
        d_in=40,
        d_outs=(WIDTH, WIDTH),
        dtype=dtype,
        max_rank=max_rank,
    )


def rotary_case(dtype, rows=ROWS):
    d_outs = tuple(heads * HEAD_DIM for heads in (HEADS, KV_HEADS, KV_HEADS))
    ranks = [[a, b, a] for a, b in RANKS]
    return make_case(rows=rows, ranks=ranks, d_in=40, d_outs=d_outs, dtype=dtype)


class Cache(NamedTuple):
    """What `lora_rotary` takes beside `lora`'s operands."""

    rotary: tuple
    kv_pages: jax.Array
    page: jax.Array
    offset: jax.Array


def make_cache(dtype, rows):
    rng = np.random.default_rng(2)
    num_pages = 1 + rows // PAGE_SIZE
    angle = rng.uniform(0, 6, (rows, HEAD_DIM // 2)).astype(np.float32)
    angle = jnp.asarray(np.concatenate([angle, angle], axis=1))
    pages = rng.standard_normal((2, num_pages, KV_HEADS, PAGE_SIZE, HEAD_DIM))
    at = rng.permutation(num_pages * PAGE_SIZE)[:rows]
    page = at // PAGE_SIZE
    page[rows // 2] = num_pages + rows  # a row that stores nothing
    return Cache(
        rotary=(jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)),
        kv_pages=jnp.asarray(pages, dtype),
        page=jnp.asarray(page, jnp.int32),
        offset=jnp.asarray(at % PAGE_SIZE, jnp.int32),
    )


def segments_of(case, slots, implementation, **options):
    return segment_metadata(
        jnp.asarray(slots),
        num_slots=case.pool.num_slots,
        implementation=implementation,
        **options,
    )


def no_weight(y, x):
    """Return a weight whose product is nothing: the residual is all of y."""
    return jnp.zeros((y.shape[1], x.shape[1]), y.dtype)


@functools.partial(jax.jit, static_argnames="implementation")
def run_gated(y, x, pool, segments, *, implementation):
    return lora_gated(
        x,
        no_weight(y, x),
        None if pool is None else (pool, segments),
        residual=y,
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnames="implementation")
def run_rotary(y, x, pool, segments, cache, *, implementation):
    return lora_rotary(
        x,
        no_weight(y, x),
        *cache,
        None if pool is None else (pool, segments),
        residual=y,
        implementation=implementation,
    )


def some_slots(case, rows=ROWS):
    rng = np.random.default_rng(1)
    num_slots = case.pool.num_slots
    num_idle = max(4, rows - num_slots**2)
    return slots_of("uniform", rows, num_slots=num_slots, num_idle=num_idle, rng=rng)


def assert_near(actual, expected, dtype):
    assert actual.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), expected, **TOLERANCE[dtype]
    )


def expected_gated(y):
    gate, up = np.split(np.asarray(y, np.float32), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def expected_rotary(y, cache):
    """Return q, k and v of every row as float32."""
    y = np.asarray(y, np.float32).reshape(len(y), -1, HEAD_DIM)
    low, high = np.split(y, 2, axis=-1)
    cos, sin = (np.asarray(t, np.float32)[:, None] for t in cache.rotary)
    rotated = y * cos + np.concatenate([-high, low], axis=-1) * sin
    q, k, _ = np.split(rotated, [HEADS, HEADS + KV_HEADS], axis=1)
    return q, k, y[:, HEADS + KV_HEADS :]


ON_GPU = [
    pytest.param(dtype, "pallas_triton", marks=pytest.mark.gpu)
    for dtype in ("float32", "bfloat16", "float16")
]


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [
        ("float32", "xla"),
        ("bfloat16", "pallas_interpret"),
        # In long runs, which are optimised: without, XLA rounds SiLU of float32
        # otherwise in a kernel with adapters than in one without.
        pytest.param("float32", "pallas_interpret", marks=pytest.mark.slow),
        pytest.param("bfloat16", "xla", marks=pytest.mark.grid),
        pytest.param("float16", "xla", marks=pytest.mark.grid),
        pytest.param("float16", "pallas_interpret", marks=pytest.mark.grid),
        *ON_GPU,
    ],
)
@pytest.mark.parametrize(
    "rows",
    [ROWS, *(pytest.param(n, marks=pytest.mark.grid) for n in (MANY, 100)), TILED],
)
class TestAgainstTheStepsOneByOne:
    def test_gated(self, rows, dtype, implementation):
        case = gated_case(dtype, rows=rows)
        slots = some_slots(case, rows)
        segments = segments_of(case, slots, implementation)
        x, y = jnp.asarray(case.x), jnp.asarray(case.y)
        actual = run_gated(y, x, case.pool, segments, implementation=implementation)
        assert_near(actual, expected_gated(case.expected(slots)), dtype)
        base = run_gated(y, x, None, None, implementation=implementation)
        assert_near(base, expected_gated(case.y), dtype)
        # Rows without an adapter are what they are in a batch without any.
        np.testing.assert_array_equal(actual[slots < 0], base[slots < 0])
        assert not np.array_equal(actual, base)

    def test_rotary(self, rows, dtype, implementation):
        case = rotary_case(dtype, rows)
        slots = some_slots(case, rows)
        segments = segments_of(case, slots, implementation)
        x, y = jnp.asarray(case.x), jnp.asarray(case.y)
        cache = make_cache(dtype, rows)
        stored = np.asarray(cache.page) < cache.kv_pages.shape[1]
        at = (cache.page[stored], slice(None), cache.offset[stored])
        for operands in ((x, case.pool, segments), (x, None, None)):
            q, kv_pages = run_rotary(y, *operands, cache, implementation=implementation)
            sums = case.y if operands[1] is None else case.expected(slots)
            want_q, want_k, want_v = expected_rotary(sums, cache)
            assert_near(q, want_q, dtype)
            for pages, old, want in zip(
                kv_pages, cache.kv_pages, (want_k, want_v), strict=True
            ):
                assert_near(pages[at], want[stored], dtype)
                # All else is as it was, to the bit.
                np.testing.assert_array_equal(pages.at[at].set(0), old.at[at].set(0))


@pytest.mark.parametrize(
    ("form", "implementation"),
    [
        ("linear", "pallas_interpret"),
        *(
            pytest.param(form, implementation, marks=mark)
            for form, implementation, mark in (
                ("gated", "pallas_interpret", pytest.mark.grid),
                ("rotary", "pallas_interpret", pytest.mark.grid),
                *((form, "xla", pytest.mark.grid) for form in FORMS),
                *((form, "pallas_triton", pytest.mark.gpu) for form in FORMS),
            )
        ),
    ],
)
def test_a_row_is_bitwise_the_same_alone(form, implementation):
    cache = make_cache("bfloat16", ROWS)
    if form == "linear":
        case, weight, bias = linear_case("bfloat16", d_in=136)
    else:
        case = gated_case("bfloat16") if form == "gated" else rotary_case("bfloat16")
    slots = some_slots(case)

    def run(rows):
        segments = segments_of(case, slots[rows], implementation)
        y, x = jnp.asarray(case.y[rows]), jnp.asarray(case.x[rows])
        lora = (y, x, case.pool, segments)
        if form == "gated":
            return run_gated(*lora, implementation=implementation)
        if form == "linear":
            operands = x, weight, (case.pool, segments), bias, y
            return run_linear(*operands, implementation=implementation)
        tables = tuple(table[rows] for table in cache.rotary)
        part = cache._replace(
            rotary=tables, page=cache.page[rows], offset=cache.offset[rows]
        )
        return run_rotary(*lora, part, implementation=implementation)[0]

    together = run(np.arange(ROWS))
    for row in (0, 7, 20):
        np.testing.assert_array_equal(run(np.array([row]))[0], together[row])


def few_rows(form, slots, implementation, place=lambda pool: pool):
    """Return what runs a form of the row expand, traced anew each time.

    Args:
      place: gives another pool of the same adapters.
    """
    width, rows = 256, len(slots)
    d_outs = {
        "gated": (width, width),
        "rotary": (2 * width, width, width),
    }.get(form, (width,))
    n = len(d_outs)
    ranks = [[16] * n, [8, 40, 16][:n], [5] * n, [0] * n]
    case = make_case(rows=rows, ranks=ranks, d_in=40, d_outs=d_outs, dtype="bfloat16")
    segments = segments_of(case, np.asarray(slots, np.int32), implementation)
    tables = jax.random.normal(jax.random.key(0), (2, rows, 128), jnp.float32)
    kv_pages = jnp.zeros((2, rows, width // 128, PAGE_SIZE, 128), jnp.bfloat16)
    row = jnp.arange(rows, dtype=jnp.int32)
    y = jnp.asarray(case.y)
    weight = no_weight(y, case.x)
    options = {"residual": y, "implementation": implementation}
    lora = place(case.pool), segments
    norm = Norm(weight=y[0], eps=1e-5)

    def step(x):
        operands = x, weight
        if form == "gated":
            return lora_gated(*operands, lora, **options)
        if form == "normed":
            return lora_normed(*operands, norm, lora, **options)
        if form == "plain":
            return lora_linear(*operands, lora, **options)
        return lora_rotary(
            *operands, tuple(tables), kv_pages, row, row, lora, **options
        )

    # Anew: what was traced with other blocks is not this.
    return lambda: jax.jit(lambda x: step(x))(jnp.asarray(case.x))


@pytest.mark.parametrize("implementation", [GRID, GPU])
@pytest.mark.parametrize("form", ["gated", "rotary"])
def test_a_row_is_bitwise_the_same_in_blocks_of_any_width(
    form, implementation, monkeypatch
):
    slots, launches = [0, 1, 2, -1, 1], []
    step = few_rows(form, slots, implementation)

    def run(max_warps):
        monkeypatch.setattr(_row_expand, "_MAX_WARPS", max_warps)
        launches.append(_row_expand._fitting_block(len(slots), 256))
        return step()

    narrow, wide = run(10**9), run(0)
    assert launches == [64, 128]
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)


@pytest.mark.parametrize("implementation", ["pallas_interpret", GPU])
@pytest.mark.parametrize(
    "form", ["gated", pytest.param("rotary", marks=pytest.mark.grid), "normed", "plain"]
)
def test_rows_are_bitwise_the_same_in_one_program(form, implementation, monkeypatch):
    # Two programs, the second not full; of several adapters each, of none, and of one
    # without pages.
    step = few_rows(form, [1, -1, 0, 1, 2, 3, 1], implementation)
    choose, chosen = _row_expand._rows_of_program, []
    assert [choose(num_rows) for num_rows in (1, 32, 33, 64)] == [1, 1, 4, 4]

    def rows_of_program(num_rows):
        chosen.append(choose(num_rows))
        return chosen[-1]

    def run(most):
        monkeypatch.setattr(_row_expand, "_MAX_LONE_ROWS", most)
        return step()

    monkeypatch.setattr(_row_expand, "_rows_of_program", rows_of_program)

    jax.tree.map(np.testing.assert_array_equal, run(99), run(1))
    assert chosen == [1, 4]


@pytest.mark.parametrize("implementation", ["pallas_interpret", GPU])
@pytest.mark.parametrize(
    "form", ["gated", pytest.param("rotary", marks=pytest.mark.grid), "normed", "plain"]
)
def test_an_adapter_without_pages_is_none(form, implementation):
    # Its table points nowhere, and its first page is asked for all the same.
    own = few_rows(form, [3, 0, 3, 1], implementation)()
    none = few_rows(form, [-1, 0, -1, 1], implementation)()
    jax.tree.map(np.testing.assert_array_equal, own, none)
    assert all(np.isfinite(np.float32(leaf)).all() for leaf in jax.tree.leaves(own))


@pytest.mark.parametrize("implementation", ["pallas_interpret", GPU])
@pytest.mark.parametrize(
    "form", ["gated", pytest.param("rotary", marks=pytest.mark.grid), "normed", "plain"]
)
def test_a_layer_among_others_is_as_alone(form, implementation):
    place = functools.partial(in_second_layer, first_count=1)
    options = form, [1, -1, 0, 3, 2], implementation
    jax.tree.map(
        np.testing.assert_array_equal,
        few_rows(*options)(),
        few_rows(*options, place=place)(),
    )


@pytest.mark.parametrize(
    "place", [lambda pool: pool, functools.partial(in_second_layer, first_count=1)]
)
def test_pages_that_are_asked_for_are_there(place):
    case = make_case(rows=4, ranks=[[0, 0], [8, 40], [3, 0]])
    table = case.pool.page_table.at[2, 1:].set(-7)
    pool = dataclasses.replace(case.pool, page_table=table)
    segments = segments_of(case, np.asarray([1, 0, -1, 2], np.int32), "xla")
    placed = place(pool)
    _, _, pages, *_ = _fused.Shrunk(jnp.zeros(()), placed, segments).row_operands
    assert (np.asarray(table) >= len(case.pool.b)).any()
    assert (pages < len(case.pool.b)).all()
    by_row = dict(zip(segments.rows[0].tolist(), pages.tolist(), strict=True))
    assert by_row[0] == np.asarray(table[1]).tolist()
    assert by_row[3] == np.asarray(table[2]).tolist()
    assert set(by_row[2]) == {-1}


@pytest.mark.parametrize("modules", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "place", [lambda pool: pool, functools.partial(in_second_layer, first_count=1)]
)
def test_counts_are_one_shape_for_groups_of_up_to_three_modules(place, modules):
    ranks = [[16] * modules, [8, 40, 0, 16][:modules], [0, 3, 20, 1][:modules]]
    case = make_case(rows=4, ranks=ranks, d_outs=(16,) * modules)
    slots = np.asarray([1, 0, -1, 2], np.int32)
    segments, placed = segments_of(case, slots, "xla"), place(case.pool)
    _, _, _, counts, *_ = _fused.Shrunk(jnp.zeros(()), placed, segments).row_operands
    entries = segments.slots[0]
    of_layers = placed.num_pages.reshape(-1, len(ranks), modules)
    expected = np.where(entries[:, None] >= 0, of_layers[:, entries], 0)
    expected = expected.reshape(-1, modules)
    assert counts.shape == (len(expected), max(3, modules))
    np.testing.assert_array_equal(counts[:, :modules], expected)
    assert not counts[:, modules:].any()


@pytest.mark.parametrize("implementation", [GRID, GPU])
def test_a_row_is_bitwise_the_same_among_33_and_64(implementation):
    case, weight, bias = linear_case("bfloat16", MAX_PROJECT_ROWS, d_in=136)
    slots = some_slots(case, MAX_PROJECT_ROWS)

    def run(rows):
        segments = segments_of(case, slots[rows], implementation)
        y, x = jnp.asarray(case.y[rows]), jnp.asarray(case.x[rows])
        operands = x, weight, (case.pool, segments), bias, y
        return run_linear(*operands, implementation=implementation)

    together = run(np.arange(MAX_PROJECT_ROWS))
    some = np.random.default_rng(0).permutation(MAX_PROJECT_ROWS)[:33]
    np.testing.assert_array_equal(run(some), together[some])


@pytest.mark.parametrize("implementation", [GRID, GPU])
@pytest.mark.parametrize("form", FORMS)
def test_what_adapters_add_is_bitwise_the_same_among_65_and_128(form, implementation):
    """Of the same y: XLA may multiply otherwise."""
    case = (rotary_case if form == "rotary" else gated_case)("bfloat16", rows=128)
    slots, cache = some_slots(case, 128), make_cache("bfloat16", 128)

    def run(rows):
        segments = segments_of(case, slots[rows], implementation)
        y, x = jnp.asarray(case.y[rows]), jnp.asarray(case.x[rows])
        operands, own = (y, x, case.pool, segments), {"implementation": implementation}
        if form == "gated":
            return run_gated(*operands, **own)
        if form == "linear":
            return run_linear(x, no_weight(y, x), operands[2:], None, y, **own)
        rotary = tuple(table[rows] for table in cache.rotary)
        places = {"page": cache.page[rows], "offset": cache.offset[rows]}
        return run_rotary(*operands, cache._replace(rotary=rotary, **places), **own)[0]

    together = run(np.arange(128))
    some = np.random.default_rng(0).permutation(128)[:65]
    np.testing.assert_array_equal(run(some), together[some])


@pytest.mark.parametrize("implementation", ["xla", GRID, GPU])
def test_several_adapters_on_a_row(implementation):
    case = gated_case("float32")
    slots = np.stack([some_slots(case), np.roll(some_slots(case), 3)], axis=1)
    weights = np.random.default_rng(0).uniform(0.5, 2, slots.shape).astype(np.float32)
    segments = segment_metadata(
        jnp.asarray(slots),
        jnp.asarray(weights),
        num_slots=case.pool.num_slots,
        implementation=implementation,
    )
    x, y = jnp.asarray(case.x), jnp.asarray(case.y)
    actual = run_gated(y, x, case.pool, segments, implementation=implementation)
    sums = case.y.astype(np.float32)
    for passes in range(2):
        sums += case.expected(slots[:, passes], weights[:, passes]) - case.y
    assert_near(actual, expected_gated(sums), "float32")


@pytest.mark.parametrize("implementation", [GRID, GPU])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_rank", [16, 128])
def test_one_adapter_of_one_page_in_tables_of_any_width(
    max_rank, dtype, implementation
):
    case = gated_case(dtype, max_rank)
    slots = some_slots(case)
    weights = np.linspace(0.5, 2, ROWS, dtype=np.float32)
    segments = segment_metadata(
        jnp.asarray(slots),
        jnp.asarray(weights),
        num_slots=case.pool.num_slots,
        implementation=implementation,
    )
    actual = run_gated(
        jnp.asarray(case.y),
        jnp.asarray(case.x),
        case.pool,
        segments,
        implementation=implementation,
    )
    assert_near(actual, expected_gated(case.expected(slots, weights)), dtype)


@pytest.mark.parametrize("implementation", [GRID, GPU])
def test_the_gradient_is_that_of_the_steps(implementation):
    case = gated_case("float32")
    slots = some_slots(case)
    cotangent = jnp.asarray(np.random.default_rng(3).standard_normal((ROWS, WIDTH)))

    def gradients(implementation):
        segments = segments_of(case, slots, implementation)

        def loss(y, x, a, b):
            pool = dataclasses.replace(case.pool, a=a, b=b)
            h = lora_gated(
                x,
                no_weight(y, x),
                (pool, segments),
                residual=y,
                implementation=implementation,
            )
            return (h * cotangent.astype(h.dtype)).sum()

        arrays = (jnp.asarray(case.y), jnp.asarray(case.x), case.pool.a, case.pool.b)
        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arrays)

    for ours, plain in zip(gradients(implementation), gradients("xla"), strict=True):
        assert np.abs(plain).max() > 0
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


def test_tables_of_numpy_have_gradients():
    case = gated_case("float32")
    segments = segments_of(case, some_slots(case), "xla")
    tables = {
        name: np.asarray(getattr(case.pool, name))
        for name in ("page_table", "num_pages")
    }

    @jax.jit
    def gradient(a, tables):
        def loss(a):
            pool = dataclasses.replace(case.pool, a=a, **tables)
            x, y = jnp.asarray(case.x), jnp.asarray(case.y)
            lora = pool, segments
            h = lora_gated(x, no_weight(y, x), lora, residual=y, implementation="xla")
            return h.sum()

        return jax.grad(loss)(a)

    constant = jax.jit(lambda a: gradient.__wrapped__(a, tables))(case.pool.a)
    np.testing.assert_array_equal(constant, gradient(case.pool.a, tables))


def test_operands_that_do_not_fit():
    case, cache = gated_case("float32"), make_cache("float32", ROWS)
    segments = segments_of(case, some_slots(case), "xla")
    x, y = jnp.asarray(case.x), jnp.asarray(case.y)
    lora, weight = (case.pool, segments), no_weight(y, x)
    with pytest.raises(ValueError, match=r"weight must be \[2 \* width, d_in\]"):
        lora_gated(x, weight[:7])
    with pytest.raises(ValueError, match="two modules as wide as the weight's halves"):
        lora_gated(x, weight[:80], lora)
    with pytest.raises(ValueError, match=r"x must be \[rows, d_in\] and weight"):
        lora_linear(x, weight[:, 1:])
    with pytest.raises(ValueError, match="x must be"):
        lora_linear(x[:3], weight, lora)
    with pytest.raises(ValueError, match="modules must be 80 wide together"):
        lora_linear(x, weight[:80], lora)
    with pytest.raises(ValueError, match=r"weight must be \[\(heads \+ 2"):
        lora_rotary(x, weight[:95], *cache)
    wide = jnp.zeros(((HEADS + 2 * KV_HEADS) * HEAD_DIM, x.shape[1]))
    with pytest.raises(ValueError, match="the cosine must be"):
        lora_rotary(x, wide, *cache._replace(rotary=(x, x)))
    with pytest.raises(ValueError, match="the pool's modules must be"):
        lora_rotary(x, wide, *cache, lora)
    for name in ("page", "offset"):
        short = cache._replace(**{name: getattr(cache, name)[:-1]})
        rows = rf"{name} must be int32\[{ROWS}\], got int32\[{ROWS - 1}\]"
        with pytest.raises(ValueError, match=rows):
            lora_rotary(x, wide, *short)


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ({"bias": ((40,), "bfloat16")}, r"bias must be bfloat16\[48\], got bfloat16"),
        ({"bias": ((48,), "float32")}, r"bias must be bfloat16\[48\], got float32"),
        ({"residual": ((5, 48), "bfloat16")}, r"residual must be bfloat16\[3, 48\]"),
        ({"residual": ((3, 48), "float32")}, r"residual must be bfloat16\[3, 48\]"),
        ({"x": ((3, 32), "float32")}, "one dtype, got float32 and bfloat16"),
    ],
)
def test_no_kernel_gets_what_does_not_fit(bad, what, implementation):
    shapes = {"x": ((3, 32), "bfloat16"), **bad}
    given = {name: jnp.zeros(*shape) for name, shape in shapes.items()}
    weight = jnp.zeros((48, 32), "bfloat16")
    norm = Norm(jnp.ones(48, "bfloat16"), 1e-5)
    options = {"implementation": implementation, **given}
    with pytest.raises(ValueError, match=what):
        lora_linear(weight=weight, **options)
    with pytest.raises(ValueError, match=what):
        lora_gated(weight=weight, **options)
    with pytest.raises(ValueError, match=what):
        lora_normed(weight=weight, norm=norm, **options)


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret", GPU])
def test_no_rows(implementation):
    options = {"implementation": implementation}
    x, weight = jnp.zeros((0, 32), "bfloat16"), jnp.ones((48, 32), "bfloat16")
    norm = Norm(jnp.ones(48, "bfloat16"), 1e-5)
    assert lora_linear(x, weight, **options).shape == (0, 48)
    assert lora_gated(x, weight, **options).shape == (0, 24)
    y, normed = lora_normed(x, weight, norm, **options)
    assert (
        y.shape == normed.shape == rms_norm(y, norm.weight, eps=1e-5, **options).shape
    )
    cache = make_cache("bfloat16", 1)
    none = {name: getattr(cache, name)[:0] for name in ("page", "offset")}
    cache = cache._replace(rotary=tuple(t[:0] for t in cache.rotary), **none)
    wide = jnp.ones(((HEADS + 2 * KV_HEADS) * HEAD_DIM, 32), "bfloat16")
    q, kv_pages = lora_rotary(x, wide, *cache, **options)
    assert q.shape == (0, HEADS, HEAD_DIM)
    np.testing.assert_array_equal(np.float32(kv_pages), np.float32(cache.kv_pages))


LINEAR_DTYPES = [
    ("float32", "xla"),
    ("bfloat16", "xla"),
    ("float32", "pallas_interpret"),
    ("bfloat16", "pallas_interpret"),
    pytest.param("float16", "pallas_interpret", marks=pytest.mark.grid),
    *ON_GPU,
]


def linear_case(dtype, rows=ROWS, d_in=1320):
    """Adapters of one page and of several, over several splits, not all whole."""
    case = make_case(rows=rows, ranks=RANKS, d_in=d_in, d_outs=(72, 40), dtype=dtype)
    rng = np.random.default_rng(4)
    weight = rng.standard_normal((112, d_in)) / np.sqrt(d_in)
    bias = rng.standard_normal(112)
    return case, jnp.asarray(weight, dtype), jnp.asarray(bias, dtype)


@functools.partial(jax.jit, static_argnames="implementation")
def run_linear(x, weight, lora, bias, residual, *, implementation):
    return lora_linear(
        x, weight, lora, bias=bias, residual=residual, implementation=implementation
    )


@pytest.mark.parametrize(("dtype", "implementation"), LINEAR_DTYPES)
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(1, marks=pytest.mark.grid),
        ROWS,
        pytest.param(48, marks=pytest.mark.grid),
        pytest.param(70, marks=pytest.mark.grid),  # too many for one launch
        TILED,
    ],
)
def test_linear(rows, dtype, implementation):
    case, weight, bias = linear_case(dtype, rows)
    slots = np.random.default_rng(1).integers(-1, len(RANKS), rows, dtype=np.int32)
    slots[0] = 1
    segments = segments_of(case, slots, implementation)
    x, y = jnp.asarray(case.x), jnp.asarray(case.y)
    product = np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T
    base = product + np.asarray(bias, np.float32) + np.asarray(y, np.float32)
    with_lora = base + case.expected(slots) - np.asarray(y, np.float32)
    for own, expected in ((None, base), ((case.pool, segments), with_lora)):
        actual = run_linear(x, weight, own, bias, y, implementation=implementation)
        assert_near(actual, expected, dtype)
    alone = run_linear(x, weight, None, None, None, implementation=implementation)
    assert_near(alone, product, dtype)


@pytest.mark.parametrize("implementation", ["pallas_interpret", GPU])
@pytest.mark.parametrize(
    ("d_in", "num_modules"),
    [
        pytest.param(136, 2, marks=pytest.mark.grid),
        pytest.param(1320, 2, marks=pytest.mark.grid),
        pytest.param(2504, 2, marks=pytest.mark.grid),  # groups of two, not all whole
        (2560, 1),
        pytest.param(2560, 2, marks=pytest.mark.slow),
        pytest.param(5760, 2, marks=pytest.mark.grid),  # an odd number of blocks
        pytest.param(2560, 5, marks=pytest.mark.grid),  # too many to be joined
    ],
)
def test_the_shrink_beside_the_base_is_that_of_its_own_launch(
    d_in, num_modules, implementation, monkeypatch
):
    case = make_case(
        rows=ROWS,
        ranks=[[*own, *own, *own][:num_modules] for own in RANKS],
        d_in=d_in,
        d_outs=(72, 40, 8, 16, 24)[:num_modules],
        dtype="bfloat16",
    )
    slots = some_slots(case)
    segments = segments_of(case, slots, implementation)
    x, lora = jnp.asarray(case.x), (case.pool, segments)
    weight = jnp.zeros((case.pool.d_out, d_in), x.dtype)
    interpret = implementation != "pallas_triton"

    def run(launch, *operands):
        return jax.jit(functools.partial(launch, interpret=interpret))(*operands)

    _, groups = run(_project.project, x, weight, lora)
    splits = run(shrink, x, *lora)
    # Two pages at once, as of more rows.
    monkeypatch.setattr(_project, "MAX_ROOMY_ROWS", 0)
    _, halves = run(_project.project, x, weight, lora)
    # What a launch of many rows does.
    monkeypatch.setattr(_sgmv_config, "_MANY_ROWS", 1)
    wide = segments_of(case, slots, implementation, block_rows=32)
    parts = run(shrink, x, case.pool, wide)
    assert len(parts) == (len(groups) if num_modules == 1 else 1)
    # And one of so many that its programs take all modules.
    monkeypatch.setattr(_shrink, "JOINT_ROWS", 1)
    [whole] = run(shrink, x, case.pool, wide)
    # `jnp.sum` would have an order of its own.
    of_groups, of_parts = (functools.reduce(jnp.add, list(v)) for v in (groups, parts))
    size = group_size(len(splits))
    equal = same_order = np.testing.assert_array_equal
    if interpret:
        # A CPU's order depends on the shape of the product.
        same_order = functools.partial(assert_near, dtype="float32")
    for number, own in enumerate(groups):
        own_splits = splits[number * size : (number + 1) * size]
        total = functools.reduce(jnp.add, own_splits, jnp.zeros_like(own))
        for entry, slot in enumerate(np.asarray(segments.slots[0])):
            for module, pages in enumerate(np.asarray(case.pool.num_pages[slot])):
                first = module * case.pool.max_rank
                ranks = slice(first, first + pages * RANK_PAGE * (slot >= 0))
                # To the bit: the order of a sum does not depend on the launch.
                equal(own[entry, ranks], total[entry, ranks])
                same_order(halves[number, entry, ranks], own[entry, ranks])
                equal(of_groups[entry, ranks], of_parts[entry, ranks])
                equal(whole[entry, ranks], of_parts[entry, ranks])


@pytest.mark.parametrize("implementation", ["pallas_interpret", GPU])
@pytest.mark.parametrize(
    (
        "form",
        "max_roomy_rows",
    ),  # with none the shrink takes two pages at once, not four
    [pytest.param("linear", 32, marks=pytest.mark.slow), ("gated", 0)],
)
def test_rows_of_many_pages_whatever_the_others_could_have(
    form, max_roomy_rows, implementation, monkeypatch
):
    monkeypatch.setattr(_project, "MAX_ROOMY_ROWS", max_roomy_rows)
    # Up to seven pages, and then in a table that has room for nine.
    ranks = [[112, 20], [70, 100], [16, 16], [0, 40]]
    slots = np.array([0, 1, 2, 3, -1, 0, 2, 1], np.int32)
    weights = np.linspace(0.5, 1.5, 8, dtype=np.float32)
    launch = lora_linear if form == "linear" else lora_gated

    def run(case):
        segments = segments_of(
            case, slots, implementation, weights=jnp.asarray(weights)
        )
        x, y = jnp.asarray(case.x), jnp.asarray(case.y)
        return jax.jit(
            lambda x, y, pool, segments: launch(
                x,
                no_weight(y, x),
                (pool, segments),
                residual=y,
                implementation=implementation,
            )
        )(x, y, case.pool, segments)

    options = {"rows": 8, "d_in": 40, "d_outs": (WIDTH, WIDTH), "dtype": "bfloat16"}
    case = make_case(ranks=ranks, **options)
    assert case.pool.max_rank == 112
    actual = run(case)
    expected = case.expected(slots, weights)
    if form == "gated":
        expected = expected_gated(expected)
    assert_near(actual, expected, "bfloat16")
    wide = make_case(ranks=ranks, max_rank=144, **options)
    np.testing.assert_array_equal(actual, run(wide))


@pytest.mark.parametrize("implementation", ["pallas_interpret", GPU])
@pytest.mark.parametrize("splits", [3, 5, 11])
@pytest.mark.parametrize("by_row", [False, True])
def test_an_expand_adds_splits_and_their_groups_alike(by_row, splits, implementation):
    case = make_case(rows=5, ranks=RANKS)  # float32: no rounding hides the order
    segments = segments_of(case, np.arange(5, dtype=np.int32), implementation)
    rng = np.random.default_rng(7)
    v = rng.standard_normal((splits, 5, 2 * case.pool.max_rank)).astype(np.float32)
    size = group_size(splits)
    groups = [
        functools.reduce(np.add, v[first : first + size])
        for first in range(0, splits, size)
    ]

    @jax.jit
    def run(y, v, pool, segments):
        interpret = implementation != "pallas_triton"
        forms = _row_expand if by_row else _fused
        return forms.expand(y, _fused.Shrunk(v, pool, segments), interpret=interpret)

    of_splits, of_groups = (
        run(jnp.asarray(case.y), jnp.asarray(parts), case.pool, segments)
        for parts in (v, np.stack(groups))
    )
    np.testing.assert_array_equal(of_splits, of_groups)


@pytest.mark.parametrize("kib", [227, 163, 99])  # H200, A100, L4
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("d_in", [64, 4096, 14336])
@pytest.mark.parametrize("d_out", [24, 4096, 6144, 12288, 22016, 28672])
@pytest.mark.parametrize("shrinks", [False, True])
@pytest.mark.parametrize("tile_rows", [16, 32, MAX_PROJECT_ROWS])
def test_a_program_fits_its_multiprocessor(tile_rows, shrinks, d_in, d_out, dtype, kib):
    config = project_config(
        *(d_in, d_out, dtype, kib * 1024), tile_rows=tile_rows, shrinks=shrinks
    )
    product = config.block_k * (config.block_n + tile_rows)
    shrink = shrink_config(d_in, dtype).block_d * (16 + 64)
    values = product if dtype == "float32" else max(product, shrink)
    needed = config.num_stages * values * jnp.dtype(dtype).itemsize
    assert needed <= kib * 1024 and config.num_stages >= 2


@pytest.mark.parametrize("implementation", [GRID, GPU])
def test_the_gradient_of_linear_is_that_of_the_steps(implementation):
    case, weight, bias = linear_case("bfloat16", d_in=136)
    slots = some_slots(case)

    def gradients(implementation):
        segments = segments_of(case, slots, implementation)

        def loss(x, weight, a, b, bias, residual):
            pool = dataclasses.replace(case.pool, a=a, b=b)
            y = run_linear(
                x,
                weight,
                (pool, segments),
                bias,
                residual,
                implementation=implementation,
            )
            return jnp.sin(y.astype(jnp.float32)).sum()

        x, y = jnp.asarray(case.x), jnp.asarray(case.y)
        a, b = (jnp.nan_to_num(array) for array in (case.pool.a, case.pool.b))
        return jax.jit(jax.grad(loss, range(6)))(x, weight, a, b, bias, y)

    for ours, plain in zip(gradients(implementation), gradients("xla"), strict=True):
        ours, plain = (np.asarray(array, np.float32) for array in (ours, plain))
        assert np.linalg.norm(ours - plain) < 3e-2 * np.linalg.norm(plain)


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
@pytest.mark.parametrize(("width", "dtype"), [(16, "float32"), (32, "bfloat16")])
def test_a_norms_weight_that_is_not_the_rows(width, dtype, implementation):
    weight = jnp.ones(width, dtype)
    with pytest.raises(ValueError, match=r"weight must be float32\[32\], got"):
        rms_norm(jnp.ones((3, 32)), weight, eps=1e-5, implementation=implementation)


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret", GPU])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [40, 128])
def test_norm(width, dtype, implementation):
    rng = np.random.default_rng(5)
    x = jnp.asarray(3 * rng.standard_normal((7, width)), dtype)
    weight = jnp.asarray(rng.uniform(0.5, 2, width), dtype)
    norm = functools.partial(rms_norm, eps=1e-5, implementation=implementation)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5)
    assert_near(norm(x, weight), expected * np.asarray(weight, np.float64), dtype)
    np.testing.assert_array_equal(norm(x[2:3], weight)[0], norm(x, weight)[2])
    assert np.isfinite(norm(jnp.zeros_like(x), weight)).all()

    def loss(x, weight):
        return jnp.sin(norm(x, weight).astype(jnp.float32)).sum()

    def plain(x, weight):
        return jnp.sin(reference.rms_norm(x, weight, 1e-5).astype(jnp.float32)).sum()

    for ours, theirs in zip(
        jax.grad(loss, (0, 1))(x, weight),
        jax.grad(plain, (0, 1))(x, weight),
        strict=True,
    ):
        np.testing.assert_allclose(
            np.asarray(ours, np.float32),
            np.asarray(theirs, np.float32),
            **TOLERANCE[dtype],
        )
