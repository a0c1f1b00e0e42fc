import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import punica_jax as pj
from punica_jax.models import LoraLinear, LoraPools
from punica_jax.pallas_kernels import (
    lora,
    lora_gated,
    lora_linear,
    lora_rotary,
    pack_adapters,
    segment_metadata,
)
from tests.sgmv_cases import make_case, rarely
from tests.tiny_checkpoint import CONFIG

GPU = pytest.param("pallas_triton", marks=pytest.mark.gpu)
IMPLEMENTATIONS = ["xla", "pallas_interpret", GPU]
INTERPRET_GRID = pytest.param("pallas_interpret", marks=pytest.mark.grid)


def test_numpy_proof_of_concept():
    # The demonstration that the project started from, number for number.
    rng = np.random.RandomState(42)
    n, d, h, r = 64, 64, 32, 8
    x, w = rng.randn(n, d), rng.randn(d, h)
    a = np.stack([rng.randn(d, r) for _ in range(n)])
    b = np.stack([rng.randn(r, h) for _ in range(n)])
    expected = x @ w + np.einsum("nd,ndr,nrh->nh", x, a, b)
    first = [5.833, 55.263, -20.852, 35.888, 11.676]
    np.testing.assert_allclose(expected[0, :5], first, atol=5e-4)
    np.testing.assert_allclose(expected.sum(), 286.1164, atol=5e-5)
    y = pj.lora(
        jnp.asarray(x @ w, jnp.float32),
        jnp.asarray(x, jnp.float32),
        jnp.asarray(a.swapaxes(1, 2), jnp.float32),
        jnp.asarray(b.swapaxes(1, 2), jnp.float32),
        jnp.arange(n, dtype=jnp.int32),
    )
    np.testing.assert_allclose(y, expected, atol=1e-4, rtol=1e-4)


def dense(y, x, a, b, slots, weights):
    """The op as one gather and two products a row."""
    a = jnp.where((slots >= 0)[:, None, None], a[slots], 0.0)
    v = jnp.einsum("nrd,nd->nr", a, x, precision="highest") * weights[:, None]
    return y + jnp.einsum("nor,nr->no", b[slots], v, precision="highest")


def gradient_inputs(rows=21, num_slots=3, rank=20, d_in=24, d_out=40):
    rng = np.random.default_rng(7)
    draw = functools.partial(rng.standard_normal, dtype=np.float32)
    slots = rng.integers(-1, num_slots, rows).astype(np.int32)
    arrays = (
        draw((rows, d_out)),
        draw((rows, d_in)),
        draw((num_slots, rank, d_in)) / np.sqrt(d_in),
        draw((num_slots, d_out, rank)) / np.sqrt(rank),
        rng.random(rows).astype(np.float32),
    )
    return slots, tuple(map(jnp.asarray, arrays)), jnp.asarray(draw((rows, d_out)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_against_dense(implementation):
    slots, arrays, direction = gradient_inputs()

    def loss(y, x, a, b, weights):
        segments = segment_metadata(
            jnp.asarray(slots), weights, num_slots=3, implementation=implementation
        )
        pool = pack_adapters(a, b)
        out = lora(y, x, pool, segments, implementation=implementation)
        return (jnp.sin(out) * direction).sum()

    def dense_loss(y, x, a, b, weights):
        return (jnp.sin(dense(y, x, a, b, slots, weights)) * direction).sum()

    argnums = (0, 1, 2, 3, 4)
    actual = jax.jit(jax.grad(loss, argnums))(*arrays)
    expected = jax.jit(jax.grad(dense_loss, argnums))(*arrays)
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", INTERPRET_GRID, GPU])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_in_half_precision(dtype, implementation):
    slots, arrays, direction = gradient_inputs()
    arrays = arrays[:4]

    def loss(y, x, a, b):
        segments = segment_metadata(
            jnp.asarray(slots), num_slots=3, implementation=implementation
        )
        pool = pack_adapters(a, b)
        out = lora(y, x, pool, segments, implementation=implementation)
        return (out.astype(jnp.float32) * direction).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    actual = gradient(*(array.astype(dtype) for array in arrays))
    expected = gradient(*arrays)
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == dtype
        error = jnp.linalg.norm(got.astype(jnp.float32) - want)
        assert error <= 1e-2 * jnp.linalg.norm(want)


@pytest.mark.slow  # the dense products' gradients are compared by default
def test_gradients_against_finite_differences():
    slots, arrays, direction = gradient_inputs()
    segments = segment_metadata(jnp.asarray(slots), num_slots=3)

    def loss(y, x, a, b):
        out = lora(y, x, pack_adapters(a, b), segments)
        return (jnp.sin(out) * direction).sum()

    check_grads(loss, arrays[:4], order=1, modes=("rev",), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("implementation", [rarely("xla"), "pallas_interpret", GPU])
def test_second_derivatives_are_right_or_refused(implementation):
    rng = np.random.default_rng(0)
    y, x, a, b = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((5, 24), (5, 16), (2, 4, 16), (2, 24, 4))
    )
    slots = jnp.array([1, 0, 1, -1, 0], jnp.int32)

    def ours(x):
        return pj.lora(y, x, a, b, slots, implementation=implementation)

    def dense(x):
        product = jnp.einsum("ni,nri,nor->no", x, a[slots], b[slots])
        return y + jnp.where((slots >= 0)[:, None], product, 0)

    def twice(layer):
        first = jax.grad(lambda x: (layer(x) ** 3).sum())
        return jax.grad(lambda x: jnp.square(first(x)).sum())(x)

    if implementation != "xla":
        with pytest.raises(NotImplementedError, match="have first derivatives only"):
            twice(ours)
    else:
        np.testing.assert_allclose(twice(ours), twice(dense), rtol=1e-3)


@pytest.mark.parametrize("implementation", ["xla", INTERPRET_GRID, GPU])
def test_gradients_of_modules_with_own_ranks(implementation):
    # NaN in free pages and ranks that an adapter lacks must not reach a gradient.
    case = make_case(rows=19, ranks=[[16, 40], [0, 5], [33, 0]])
    slots = np.random.default_rng(8).integers(-1, 3, 19).astype(np.int32)

    def loss(y, x, a, b):
        pool = dataclasses.replace(case.pool, a=a, b=b)
        segments = segment_metadata(
            jnp.asarray(slots), num_slots=3, implementation=implementation
        )
        return (lora(y, x, pool, segments, implementation=implementation) ** 2).sum()

    pool = case.pool
    inputs = (jnp.asarray(case.y), jnp.asarray(case.x), pool.a, pool.b)
    _, dx, da, db = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*inputs)
    g = 2 * case.expected(slots).astype(np.float64)
    dx_expected = np.zeros_like(case.x, np.float64)
    for slot in range(3):
        rows = np.flatnonzero(slots == slot)
        start = 0
        for c, (a, b) in enumerate(zip(case.a[slot], case.b[slot], strict=True)):
            g_c = g[rows, start : start + b.shape[0]]
            x = case.x[rows].astype(np.float64)
            dx_expected[rows] += g_c @ b @ a
            da_expected, db_expected = (g_c @ b).T @ x, g_c.T @ (x @ a.T)
            for p in range(int(pool.num_pages[slot, c])):
                page = int(pool.page_table[slot, p])
                here = slice(16 * p, min(16 * p + 16, a.shape[0]))
                size = here.stop - here.start
                np.testing.assert_allclose(
                    da[page, c, :size], da_expected[here], rtol=1e-3, atol=1e-4
                )
                np.testing.assert_allclose(
                    db[page, :size, start : start + b.shape[0]],
                    db_expected[:, here].T,
                    rtol=1e-3,
                    atol=1e-4,
                )
            start += b.shape[0]
    np.testing.assert_allclose(dx, dx_expected, rtol=1e-3, atol=1e-4)
    assert np.isfinite(da).all() and np.isfinite(db).all()


@pytest.mark.parametrize("implementation", ["xla", INTERPRET_GRID, GPU])
@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"]
)
def test_a_layer_among_others_is_bitwise_the_layer_alone(dtype, implementation):
    case = make_case(rows=19, ranks=[[16, 40], [0, 5], [33, 0]], dtype=dtype)
    rng = np.random.default_rng(8)
    slots = jnp.asarray(rng.integers(-1, 3, 19).astype(np.int32))
    weights = jnp.asarray(rng.random(19, np.float32))
    alone = [
        dataclasses.replace(
            case.pool,
            a=case.pool.a * jnp.asarray(layer + 1, dtype),
            b=case.pool.b - jnp.asarray(layer, dtype),
            num_pages=jnp.minimum(case.pool.num_pages, 3 - layer),
        )
        for layer in range(3)
    ]
    own = {
        name: jnp.concatenate([getattr(pool, name) for pool in alone])
        for name in ("a", "b", "num_pages")
    }
    together = dataclasses.replace(case.pool, **own)

    @jax.jit
    def products(pool):
        def apply(y, x, a, b, weights):
            segments = segment_metadata(
                slots, weights, num_slots=3, implementation=implementation
            )
            filled = dataclasses.replace(pool, a=a, b=b)
            return lora(y, x, filled, segments, implementation=implementation)

        inputs = jnp.asarray(case.y), jnp.asarray(case.x), pool.a, pool.b, weights
        out, gradients = jax.vjp(apply, *inputs)
        return out, *gradients(out)

    for layer, pool in enumerate(alone):
        here = dataclasses.replace(together, layer=jnp.full(1, layer, jnp.int32))
        *same, da, db, dweights = products(pool)
        *same_here, da_here, db_here, dweights_here = products(here)
        pairs = [*zip(same, same_here, strict=True), (dweights, dweights_here)]
        for gradient, found in ((da, da_here), (db, db_here)):
            expected = np.zeros((3, *gradient.shape), gradient.dtype)
            expected[layer] = gradient
            assert gradient.any()
            pairs.append((expected.reshape(found.shape), found))
        for expected, found in pairs:
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("implementation", ["xla", INTERPRET_GRID, GPU])
def test_integers_of_64_bits_change_nothing(implementation):
    slots, (y, x, a, b, weights), dy = gradient_inputs()

    def run():
        def loss(y, x, a, b, weights):
            segments = segment_metadata(
                jnp.asarray(slots, jnp.int32),
                weights,
                num_slots=3,
                implementation=implementation,
            )
            pool = pack_adapters(a, b, jnp.asarray([20, 3, 17], jnp.int32))
            return (
                lora(y, x, pool, segments, implementation=implementation) * dy
            ).sum()

        return jax.jit(jax.grad(loss, argnums=range(5)))(y, x, a, b, weights)

    expected = run()
    with jax.enable_x64(True):
        jax.tree.map(np.testing.assert_array_equal, run(), expected)


def test_shard_map_column_and_row_parallel():
    # Punica's scheme: column-parallel splits B, row-parallel splits A and adds before
    # the all-reduce; tests/conftest.py makes the CPU two devices.
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(9)
    a = jnp.asarray(rng.standard_normal((3, 24, 32)), jnp.float32)
    b = jnp.asarray(rng.standard_normal((3, 48, 24)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((10, 32)), jnp.float32)
    y = jnp.asarray(rng.standard_normal((10, 48)), jnp.float32)
    slots = jnp.asarray(rng.integers(-1, 3, 10), jnp.int32)
    expected = jax.jit(pj.lora)(y, x, a, b, slots)

    column = jax.shard_map(
        pj.lora,
        mesh=mesh,
        in_specs=(P(None, "tp"), P(), P(), P(None, "tp", None), P()),
        out_specs=P(None, "tp"),
    )
    np.testing.assert_allclose(
        jax.jit(column)(y, x, a, b, slots), expected, rtol=1e-5, atol=1e-4
    )

    def add_before_all_reduce(y, x, a, b, slots):
        partial = pj.lora(jnp.zeros_like(y), x, a, b, slots)
        return y + jax.lax.psum(partial, "tp")

    row = jax.shard_map(
        add_before_all_reduce,
        mesh=mesh,
        in_specs=(P(), P(None, "tp"), P(None, None, "tp"), P(), P()),
        out_specs=P(),
    )
    np.testing.assert_allclose(
        jax.jit(row)(y, x, a, b, slots), expected, rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("implementation", ["xla", GPU])
def test_gradients_under_shard_map_with_its_checks(implementation):
    rng = np.random.default_rng(4)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    slots = jnp.asarray([0, 2, -1, 1, 0, 2], jnp.int32)
    x, weights = draw(6, 32), jnp.asarray(rng.random(6), jnp.float32)
    # Weight, A and B: the first layer's columns are split, the second one's rows.
    first = draw(48, 32) / 6, draw(3, 8, 32) / 6, draw(3, 48, 8) / 3
    second = draw(32, 48) / 7, draw(3, 20, 48) / 7, draw(3, 32, 20) / 4

    def forward(x, weights, first, second):
        segments = segment_metadata(
            slots, weights, num_slots=3, implementation=implementation
        )
        for weight, a, b in (first, second):
            pool = pack_adapters(a, b)
            x = lora_linear(x, weight, (pool, segments), implementation=implementation)
        return x

    mesh = jax.make_mesh(
        (len(jax.devices()),), ("tp",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    columns = P("tp"), P(), P(None, "tp")
    rows = P(None, "tp"), P(None, None, "tp"), P()
    sharded = jax.shard_map(
        lambda *operands: jax.lax.psum(forward(*operands), "tp"),
        mesh=mesh,
        in_specs=(P(), P(), columns, rows),
        out_specs=P(),
    )

    def gradients(function):
        def loss(*operands):
            return jnp.square(function(*operands)).sum()

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
        with jax.default_matmul_precision("highest"):
            return run(x, weights, first, second)

    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(near, gradients(sharded), gradients(forward))


def test_inside_another_jit_vmap_free_scan():
    a, b = jnp.ones((2, 4, 8)), jnp.ones((2, 16, 4))
    x, y = jnp.ones((3, 8)), jnp.zeros((3, 16))
    slots = jnp.asarray([0, -1, 1], jnp.int32)

    @jax.jit
    def outer(y):
        inner = jax.jit(pj.lora)
        return jax.lax.fori_loop(0, 3, lambda _, y: inner(y, x, a, b, slots), y)

    expected = np.repeat([[96.0], [0.0], [96.0]], 16, axis=1)
    np.testing.assert_allclose(outer(y), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (5, 16)}, r"x must be \[rows, width\] = \(4, 16\).* got \(5, 16\)"),
        ({"x": (4, 24)}, r"x must be .* = \(4, 16\)"),
        ({"y": (4, 16)}, r"y must be .* = \(4, 8\).* got \(4, 16\)"),
        ({"b": (2, 8, 5)}, r"a must be \[slots, rank, d_in\] and b .* \(2, 8, 5\)"),
        ({"a": (2, 4, 12), "x": (4, 12)}, "d_in must be a multiple of 8 .* got 12"),
        ({"b": (2, 12, 4), "y": (4, 12)}, "d_out must be a multiple of 8 .* got 12"),
        ({"a": (2, 0, 16), "b": (2, 8, 0)}, r"rank must be at least 1"),
    ],
)
def test_bad_shapes(change, message):
    shapes = {"y": (4, 8), "x": (4, 16), "a": (2, 4, 16), "b": (2, 8, 4)} | change
    arrays = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        pj.lora(**arrays, slots=jnp.zeros((4,), jnp.int32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows(implementation):
    x, y = jnp.zeros((0, 16)), jnp.zeros((0, 8))
    a, b = jnp.ones((2, 4, 16)), jnp.ones((2, 8, 4))
    slots = jnp.zeros((0,), jnp.int32)
    add = functools.partial(pj.lora, implementation=implementation)
    got = add(y, x, a, b, slots)
    assert (got.shape, got.dtype) == ((0, 8), jnp.float32)
    grad = jax.jit(jax.grad(lambda a: add(y, x, a, b, slots).sum()))(a)
    np.testing.assert_array_equal(grad, jnp.zeros_like(a))
    for wrong in (jnp.zeros((3, 16)), jnp.zeros((0,))):
        with pytest.raises(ValueError, match=r"x must be \[0, d_in\], as y has no"):
            add(y, wrong, a, b, slots)
    with pytest.raises(ValueError, match="signed integers, got float32"):
        add(y, x, a, b, slots.astype(jnp.float32))


def test_slots_of_another_length():
    x, y = jnp.zeros((3, 8)), jnp.zeros((3, 16))
    with pytest.raises(ValueError, match=r"slots i32\[rows\], got y \(3, 16\).*\(2,\)"):
        pj.lora(y, x, jnp.ones((2, 4, 8)), jnp.ones((2, 16, 4)), [0, 1])  # pyright: ignore


def test_ranks_beyond_the_stack_count_as_all_of_it():
    a, b = jnp.ones((3, 20, 8)), jnp.ones((3, 16, 20))
    pool = pack_adapters(a, b, jnp.asarray([48, 20, 0], jnp.int32))
    np.testing.assert_array_equal(pool.num_pages, [[2], [2], [0]])


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"ranks": jnp.array([4])}, r"each of 2 slots, got int32\[1\]"),
        ({"ranks": [4, 4, 4]}, r"each of 2 slots, got int32\[3\]"),
        ({"ranks": [4.5, 8.0]}, r"each of 2 slots, got float32\[2\]"),
        ({"b": jnp.ones((2, 16, 8), "bfloat16")}, "float32 and bfloat16; cast"),
        ({"b": jnp.ones((2, 16, 7))}, r"b \[slots, d_out, rank\]"),
    ],
)
def test_stacks_that_do_not_fit(changed, what):
    given = {"a": jnp.ones((2, 8, 32)), "b": jnp.ones((2, 16, 8)), **changed}
    with pytest.raises(ValueError, match=what):
        pack_adapters(**given)


def test_bad_dtypes_and_slots():
    y, x = jnp.zeros((4, 8)), jnp.zeros((4, 16), jnp.bfloat16)
    a, b = jnp.zeros((2, 4, 16)), jnp.zeros((2, 8, 4))
    slots = jnp.zeros((4,), jnp.int32)
    with pytest.raises(ValueError, match="x, A and B must have one dtype, got x bfl"):
        pj.lora(y, x, a, b, slots)
    segments = segment_metadata(slots, num_slots=3)
    with pytest.raises(ValueError, match="made for 3 slots, the pool has 2"):
        lora(y, x.astype(jnp.float32), pack_adapters(a, b), segments)
    half = jnp.float64 if jax.config.jax_enable_x64 else jnp.int32
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        pj.lora(*(t.astype(half) for t in (y, x, a, b)), slots)


@pytest.mark.parametrize("implementation", ["xla", INTERPRET_GRID])
def test_slots_of_64_bits_are_none_where_they_are_too_large(implementation):
    with jax.enable_x64(True):
        y, x = jnp.zeros((3, 16), jnp.float32), jnp.ones((3, 16), jnp.float32)
        a, b = jnp.ones((2, 8, 16), jnp.float32), jnp.ones((2, 16, 8), jnp.float32)
        slots = jnp.asarray([0, 1 << 32, -(1 << 32) + 1], jnp.int64)
        add = functools.partial(pj.lora, implementation=implementation)
        found = jax.jit(add)(y, x, a, b, slots)
    np.testing.assert_array_equal(found[:, 0], [128, 0, 0])
    # Without, JAX would cut them before anybody could look.
    for given in (np.asarray(slots), [0, 1 << 32, -(1 << 40)]):
        np.testing.assert_array_equal(add(y, x, a, b, given)[:, 0], [128, 0, 0])


def test_operands_that_are_no_arrays():
    good = {"y": jnp.zeros((3, 16)), "x": jnp.ones((3, 16)), "slots": np.zeros(3, int)}
    good |= {"a": np.ones((2, 8, 16)), "b": np.ones((2, 16, 8))}
    for name in good:
        with pytest.raises(ValueError, match=f"^{name} must be an array, got NoneType"):
            pj.lora(**good | {name: None})
    with pytest.raises(ValueError, match=r"^a must be an array, got dict"):
        pack_adapters({}, good["b"])
    pool = pack_adapters(good["a"].tolist(), good["b"].tolist())
    # Lists may hold arrays that are being traced.
    traced = jax.jit(lambda a, b: pack_adapters([a, a], [b, b]))
    assert traced(good["a"][0], good["b"][0]).num_slots == 2
    with pytest.raises(ValueError, match=r"got \(NoneType, ndarray\)"):
        lora(good["y"], good["x"], None, good["slots"])
    with pytest.raises(ValueError, match=r"got \(LoraPool\)"):
        lora_linear(good["x"], jnp.ones((16, 16)), pool)
    with pytest.raises(ValueError, match=r"got \(LoraPool, int\)"):
        lora_gated(good["x"], jnp.ones((16, 16)), (pool, 1))
    with pytest.raises(ValueError, match=r"got \(LoraPool\)"):
        lora_rotary(good["x"], jnp.ones((16, 16)), *[None] * 4, pool)


@pytest.mark.parametrize(
    ("d_in", "d_outs", "message"),
    [
        (16, 24.0, "d_outs must be an integer of at least 1, got 24.0"),
        ("16", 24, "d_in must be an integer of at least 1, got '16'"),
        (16, (8, -24), "d_outs must be an integer of at least 1, got -24"),
        (0, 24, "d_in must be an integer of at least 1, got 0"),
        (16, [], "d_outs must have a width for each module, got none"),
    ],
)
def test_widths_that_are_none(d_in, d_outs, message):
    with pytest.raises(ValueError, match=message):
        LoraLinear(d_in, d_outs, rngs=nnx.Rngs(0))
    for widths in (np.int64(24), [24], np.array([24]), iter([24])):
        assert LoraLinear(16, widths, rngs=nnx.Rngs(0)).d_outs == (24,)


@pytest.mark.parametrize("value", [2.5, "2", True])
def test_sizes_of_pools_that_are_no_integers(value):
    sizes = {"num_slots": 1, "num_pages": 1, "max_rank": 16}
    for name in sizes:
        message = f"{name} must be an integer of at least 1, got {value!r}"
        with pytest.raises(ValueError, match=message):
            LoraPools.zeros(CONFIG, **sizes | {name: value})


def test_a_pair_of_a_linear_layer_that_is_none():
    layer = LoraLinear(16, 24, rngs=nnx.Rngs(0))
    pool = pack_adapters(jnp.ones((3, 4, 16)), jnp.ones((3, 24, 4)))
    segments = segment_metadata(jnp.zeros((6,), jnp.int32), num_slots=3)
    rule = r"lora must be \(pool, segments\), a LoraPool such as pools.layer\(i\).qkv"
    for pair, got in [
        ((segments, pool), r"\(Segments, LoraPool\)"),
        (pool, r"\(LoraPool\)"),
        ((pool,), r"\(LoraPool\)"),
        ((pool, segments, 1), r"\(LoraPool, Segments, int\)"),
        ((pool, None), r"\(LoraPool, NoneType\)"),
    ]:
        with pytest.raises(ValueError, match=f"{rule} .* got {got}$"):
            layer(jnp.ones((6, 16)), pair)
