"""A norm between two linear layers, left to the second to finish, against the steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.pallas_kernels import (
    Norm,
    NormedRows,
    _project,
    divided,
    lora_gated,
    lora_linear,
    lora_normed,
    segment_metadata,
)
from punica_jax.pallas_kernels._norm import sum_of_parts
from punica_jax.pallas_kernels._sgmv_config import MAX_PROJECT_ROWS
from tests.sgmv_cases import Case, make_case

GPU = pytest.param("pallas_triton", marks=pytest.mark.gpu)
GRID = pytest.param("pallas_interpret", marks=pytest.mark.grid)
ROWS, D_IN, HIDDEN, WIDTH = 21, 136, 200, 24  # no powers of two
MANY = MAX_PROJECT_ROWS + 8
EPS = 1.0  # large enough to be seen
TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 2.5e-3}
# Without a page, of one and of several.
RANKS = [[16], [40], [0], [5]]


@dataclasses.dataclass
class Chain:
    """Two layers: the adapters of each, weights, and the norm between them."""

    first: Case
    second: Case
    slots: np.ndarray
    weights: tuple
    bias: jax.Array
    norm: Norm

    @classmethod
    def make(cls, dtype, rows):
        first = make_case(
            rows=rows, ranks=RANKS, d_in=D_IN, d_outs=(HIDDEN,), dtype=dtype
        )
        ranks = [[own[0], own[0]] for own in RANKS]
        second = make_case(
            rows=rows, ranks=ranks, d_in=HIDDEN, d_outs=(WIDTH, WIDTH), dtype=dtype
        )
        rng = np.random.default_rng(4)

        def draw(*shape):
            return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]), dtype)

        slots = rng.integers(-1, len(RANKS), rows, dtype=np.int32)
        slots[0] = 1
        return cls(
            first=first,
            second=second,
            slots=slots,
            weights=(draw(HIDDEN, D_IN), draw(2 * WIDTH, HIDDEN)),
            bias=jnp.asarray(rng.standard_normal(HIDDEN), dtype),
            norm=Norm(jnp.asarray(rng.uniform(0.5, 2, HIDDEN), dtype), EPS),
        )

    def adapters(self, implementation, rows=slice(None)):
        """Return both layers' pools with the segments of some rows."""
        segments = segment_metadata(
            jnp.asarray(self.slots[rows]),
            num_slots=len(RANKS),
            implementation=implementation,
        )
        return (self.first.pool, segments), (self.second.pool, segments)

    def operands(self, rows=slice(None)):
        x, y = (jnp.asarray(array[rows]) for array in (self.first.x, self.first.y))
        return x, self.weights, self.bias, y, self.norm

    def expected(self, with_lora):
        """Float32 sums of every step, rounded where rows are stored."""

        def added(case, x, y):
            if not with_lora:
                return y
            return dataclasses.replace(case, x=x, y=y).expected(self.slots)

        w1, w2, bias, norm = (
            np.asarray(array, np.float32)
            for array in (*self.weights, self.bias, self.norm.weight)
        )
        x, residual = (np.float32(array) for array in (self.first.x, self.first.y))
        y = added(self.first, x, x @ w1.T + bias + residual)
        y = np.float32(y.astype(self.first.dtype))
        normed = norm * y / np.sqrt((y**2).mean(axis=1, keepdims=True) + EPS)
        gate, up = np.split(added(self.second, normed, normed @ w2.T), 2, axis=1)
        return y, normed, gate / (1 + np.exp(-gate)) * up


@functools.partial(jax.jit, static_argnames="implementation")
def run(x, weights, bias, residual, norm, adapters, *, implementation):
    first, second = adapters
    y, normed = lora_normed(
        x,
        weights[0],
        norm,
        first,
        bias=bias,
        residual=residual,
        implementation=implementation,
    )
    gated = lora_gated(normed, weights[1], second, implementation=implementation)
    return y, normed, gated


@pytest.mark.parametrize(
    ("dtype", "implementation", "rows"),
    [
        ("bfloat16", "pallas_interpret", ROWS),
        pytest.param("bfloat16", "pallas_interpret", 1, marks=pytest.mark.grid),
        ("bfloat16", "xla", ROWS),
        pytest.param("bfloat16", "pallas_interpret", MANY, marks=pytest.mark.grid),
        pytest.param("float16", "pallas_interpret", ROWS, marks=pytest.mark.grid),
        pytest.param("float32", "pallas_interpret", ROWS, marks=pytest.mark.grid),
        *(
            pytest.param(dtype, "pallas_triton", rows, marks=pytest.mark.gpu)
            for dtype, rows in (
                *(("bfloat16", rows) for rows in (1, ROWS, MAX_PROJECT_ROWS, MANY)),
                ("float16", ROWS),
                ("float32", ROWS),
            )
        ),
    ],
)
def test_the_steps_one_by_one(dtype, implementation, rows):
    chain = Chain.make(dtype, rows)
    for adapters in (chain.adapters(implementation), (None, None)):
        is_left = dtype == "bfloat16" and rows < MANY and implementation != "xla"
        is_left = is_left and adapters[0] is not None
        actual = run(*chain.operands(), adapters, implementation=implementation)
        y, normed, gated = actual
        assert isinstance(normed, NormedRows) == is_left
        normed = divided(normed)
        expected = chain.expected(adapters[0] is not None)
        for got, want in zip((y, normed, gated), expected, strict=True):
            assert got.dtype == jnp.dtype(dtype)
            # Of a norm, since sums of several rounded rows have no bound of their own.
            off = np.linalg.norm(np.float32(got) - np.float32(want), axis=1)
            assert (off < TOLERANCE[dtype] * np.linalg.norm(want, axis=1)).all()
        # The norm does not change what it is a norm of.
        x, weights, bias, residual, _ = chain.operands()
        plain = jax.jit(functools.partial(lora_linear, implementation=implementation))
        alone = plain(x, weights[0], adapters[0], bias=bias, residual=residual)
        np.testing.assert_array_equal(y, alone)


@pytest.mark.parametrize("implementation", ["pallas_interpret", GPU])
def test_a_row_is_bitwise_the_same_alone(implementation):
    chain = Chain.make("bfloat16", ROWS)

    def of(rows):
        adapters = chain.adapters(implementation, rows)
        y, normed, gated = run(
            *chain.operands(rows), adapters, implementation=implementation
        )
        return y, normed.x, normed.squares.T, gated

    together = of(slice(None))
    for row in (0, 7, 20):
        for alone, among in zip(of(slice(row, row + 1)), together, strict=True):
            np.testing.assert_array_equal(alone[0], among[row])


def in_one_order(parts):
    """Up to sixteen sums in turn, then by halves."""
    count = max(n for n in (1, 2, 4, 8, 16) if n <= len(parts))
    sums = [functools.reduce(np.add, parts[first::count]) for first in range(count)]
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [
            own + other for own, other in zip(sums[:half], sums[half:], strict=True)
        ]
    return sums[0]


@pytest.mark.parametrize("num_parts", range(1, 41))
def test_all_forms_add_squares_in_one_order(num_parts):
    parts = np.float32(np.random.default_rng(num_parts).uniform(size=(num_parts, 5)))
    total = sum_of_parts(parts.__getitem__, num_parts)
    np.testing.assert_array_equal(total, in_one_order(parts))


@pytest.mark.parametrize("num_parts", [12, 33])
@pytest.mark.parametrize("implementation", [GRID, GPU])
def test_squares_are_added_in_one_order(implementation, num_parts):
    rows, d_in = MAX_PROJECT_ROWS, 256
    rng = np.random.default_rng(0)
    squares = np.float32(rng.uniform(0.5, 1, (num_parts, rows)))
    # Beside one so large all that is added to it alone is lost.
    squares[rng.integers(0, num_parts, rows), np.arange(rows)] = 2**24
    case = make_case(rows=rows, ranks=[[16]], d_in=d_in, d_outs=(16,), dtype="bfloat16")
    # Each row's v is what the row is multiplied by: the products are of one and zeros.
    a = jnp.zeros_like(case.pool.a).at[..., 0].set(1)
    pool = dataclasses.replace(case.pool, a=a)
    x = jnp.zeros((rows, d_in), jnp.bfloat16).at[:, 0].set(1)
    weight = jnp.zeros((16, d_in), jnp.bfloat16)
    interpret = implementation != "pallas_triton"
    project = jax.jit(functools.partial(_project.project, interpret=interpret))

    def scales(count):
        own = jnp.asarray(squares[:, :count])
        normed = NormedRows(x=x[:count], squares=own, eps=EPS)
        segments = segment_metadata(
            jnp.zeros(count, jnp.int32), num_slots=1, implementation=implementation
        )
        _, v = project(normed, weight, (pool, segments))
        return np.asarray(v[0, :, 0])

    together = scales(rows)
    # To the bit in other tiles of rows, too.
    for count in (1, 7, 20, 32):
        np.testing.assert_array_equal(scales(count), together[:count])
    expected = 1 / np.sqrt(np.float64(in_one_order(squares)) / d_in + EPS)
    np.testing.assert_allclose(together, expected, rtol=2.5e-7)
    one_by_one = 1 / np.sqrt(np.float64(functools.reduce(np.add, squares)) / d_in + EPS)
    if num_parts > 16:
        assert abs(one_by_one / expected - 1).max() > 6e-7  # which this would see


@pytest.mark.parametrize("implementation", [GRID, GPU])
def test_the_gradient_is_that_of_the_steps(implementation):
    chain = Chain.make("bfloat16", ROWS)
    x, weights, bias, residual, norm = chain.operands()

    factor = np.random.default_rng(6).standard_normal(residual.size).astype(np.float32)

    def gradients(implementation):
        (first, segments), (second, _) = chain.adapters(implementation)

        def loss(x, weights, bias, residual, norm, arrays):
            pools = [
                dataclasses.replace(pool, a=a, b=b)
                for pool, (a, b) in zip((first, second), arrays, strict=True)
            ]
            adapters = tuple((pool, segments) for pool in pools)
            y, _, gated = run(
                x,
                weights,
                bias,
                residual,
                Norm(norm, EPS),
                adapters,
                implementation=implementation,
            )
            return sum(
                (jnp.asarray(factor[: array.size].reshape(array.shape)) * array).sum()
                for array in map(jnp.float32, (y, gated))
            )

        arrays = [
            tuple(jnp.nan_to_num(array) for array in (pool.a, pool.b))
            for pool in (first, second)
        ]
        operands = x, weights, bias, residual, norm.weight, arrays
        return jax.tree.leaves(jax.jit(jax.grad(loss, range(6)))(*operands))

    for ours, plain in zip(gradients(implementation), gradients("xla"), strict=True):
        ours, plain = (np.asarray(array, np.float32) for array in (ours, plain))
        assert np.linalg.norm(ours - plain) < 3e-2 * np.linalg.norm(plain)


@pytest.mark.parametrize("implementation", [GRID, GPU])
def test_rows_of_zeros_and_of_large_values_are_finite(implementation):
    chain = Chain.make("bfloat16", 2)
    x, weights, _, _, norm = chain.operands()
    large = jnp.full((1, HIDDEN), 1e4, x.dtype)
    residual = jnp.concatenate([jnp.zeros_like(large), large])
    no_bias = jnp.zeros_like(chain.bias)
    operands = jnp.zeros_like(x), weights, no_bias, residual, norm
    adapters = chain.adapters(implementation)
    outs = run(*operands, adapters, implementation=implementation)
    for out in jax.tree.leaves(outs):
        assert np.isfinite(np.float32(out)).all()
    np.testing.assert_array_equal(np.float32(outs[2][0]), 0)
    assert np.abs(np.float32(outs[2][1])).max() > 0


def test_a_norm_that_does_not_fit():
    chain = Chain.make("float32", 2)
    x, weights, *_ = chain.operands()
    for norm in (jnp.ones(7), jnp.ones(HIDDEN, jnp.bfloat16)):
        with pytest.raises(ValueError, match=r"the norm must be float32\[200\]"):
            lora_normed(x, weights[0], Norm(norm, EPS))
    rows = NormedRows(x=x, squares=jnp.ones((3, 9)), eps=EPS)
    with pytest.raises(ValueError, match=r"squares must be f32\[parts, rows\] of 2"):
        lora_linear(rows, weights[0])


@pytest.mark.parametrize("implementation", [GRID, GPU])
@pytest.mark.parametrize("idle", [False, True])
def test_several_modules_one_after_the_other(implementation, idle):
    """Squares are read and others written by one launch, of more modules than one."""
    rows, widths = 9, (72, 40, 16)
    width = sum(widths)
    ranks = [[own[0]] * 3 for own in RANKS]
    case = make_case(
        rows=rows, ranks=ranks, d_in=width, d_outs=widths, dtype="bfloat16"
    )
    rng = np.random.default_rng(8)
    weight = jnp.asarray(rng.standard_normal((width, width)) / width, jnp.bfloat16)
    norm = Norm(jnp.asarray(rng.uniform(0.5, 2, width), jnp.bfloat16), EPS)
    slots = rng.integers(-1, len(RANKS), rows, dtype=np.int32)
    slots = np.full(rows, -1, np.int32) if idle else slots

    def twice(implementation):
        segments = segment_metadata(
            jnp.asarray(slots), num_slots=len(RANKS), implementation=implementation
        )

        @jax.jit
        def both(x, y):
            options = {"lora": (case.pool, segments), "implementation": implementation}
            y, normed = lora_normed(x, weight, norm, residual=y, **options)
            y, normed = lora_normed(normed, weight, norm, residual=y, **options)
            return y, divided(normed)

        return both(jnp.asarray(case.x), jnp.asarray(case.y))

    for ours, plain in zip(twice(implementation), twice("xla"), strict=True):
        off = np.linalg.norm(np.float32(ours) - np.float32(plain))
        assert off < TOLERANCE["bfloat16"] * np.linalg.norm(np.float32(plain))
