"""Operations outside of `jax.jit`: as quick the second time, and as good."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.pallas_kernels import (
    Norm,
    kth_largest,
    lora,
    lora_gated,
    lora_linear,
    lora_normed,
    lora_rotary,
    nucleus,
    paged_attention,
    rms_norm,
    segment_metadata,
)
from tests.attention_cases import make_batch
from tests.sgmv_cases import TOLERANCE, make_case

ROWS, HEADS, HEAD_DIM = 4, 2, 16
SLOTS = jnp.asarray([1, -1, 0, 1], jnp.int32)
KERNELS = pytest.param("pallas_triton", marks=pytest.mark.gpu), "pallas_interpret"


@functools.cache
def adapters(implementation):
    """Return a case whose modules are gate and up, or three of two heads, and who has
    which adapter."""
    width = 3 * HEADS * HEAD_DIM
    case = make_case(
        rows=ROWS, ranks=[[16] * 3, [8] * 3], d_in=64, d_outs=(width // 3,) * 3
    )
    options = {"num_slots": 2, "implementation": implementation}
    weight = np.random.default_rng(1).standard_normal((width, 64)) / 8
    return case, segment_metadata(SLOTS, **options), jnp.asarray(weight, jnp.float32)


def two_modules(implementation):
    case = make_case(rows=ROWS, ranks=[[16] * 2, [8] * 2], d_in=64, d_outs=(48, 48))
    return (case.pool, adapters(implementation)[1]), jnp.asarray(case.x)


def of_rotary(implementation):
    case, segments, weight = adapters(implementation)
    angles = jnp.ones((ROWS, HEAD_DIM), jnp.float32)
    pages = jnp.zeros((2, 1, HEADS, 16, HEAD_DIM), jnp.float32)
    page, offset = jnp.zeros(ROWS, jnp.int32), jnp.arange(ROWS, dtype=jnp.int32)
    rotary = (jnp.cos(angles), jnp.sin(angles)), pages, page, offset
    return lora_rotary(
        jnp.asarray(case.x),
        weight,
        *rotary,
        (case.pool, segments),
        implementation=implementation,
    )


def of_lora(implementation, operation):
    case, segments, weight = adapters(implementation)
    options = {"implementation": implementation}
    x, y = jnp.asarray(case.x), jnp.asarray(case.y)
    pair = case.pool, segments
    norm = Norm(jnp.ones(y.shape[1]), 1e-5)
    if operation == "gradient":
        return jax.grad(lambda x: lora(y, x, *pair, **options).sum())(x)
    return {
        "lora": lambda: lora(y, x, *pair, **options),
        "linear": lambda: lora_linear(x, weight, pair, **options),
        "normed": lambda: lora_normed(x, weight, norm, pair, **options)[0],
        "norm": lambda: rms_norm(y, norm.weight, eps=1e-5, **options),
    }[operation]()


def of_gated(implementation):
    pair, x = two_modules(implementation)
    weight = adapters(implementation)[2]
    return lora_gated(x, weight, pair, implementation=implementation)


def of_attention(implementation, query_lens):
    batch = make_batch(query_lens, [20, 9], heads=2, kv_heads=1)
    return paged_attention(
        *batch.operands(),
        max_query_len=max(query_lens),
        implementation=implementation,
    )


def of_limits(implementation, operation):
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((2, 300)), "float32")
    options = {"implementation": implementation}
    if operation == "nucleus":
        halves = jnp.full(2, 0.5, jnp.float32)
        return nucleus(logits, halves, halves, **options)
    return kth_largest(logits, jnp.full(2, 7, jnp.int32), **options)


OPERATIONS = {
    "segment_metadata": lambda own: segment_metadata(
        [1, -1, 0, 1], num_slots=2, implementation=own
    ),
    **{
        name: functools.partial(of_lora, operation=name)
        for name in ("lora", "linear", "normed", "norm", "gradient")
    },
    "gated": of_gated,
    "rotary": of_rotary,
    "decode": functools.partial(of_attention, query_lens=[1, 1]),
    "prefill": functools.partial(of_attention, query_lens=[17, 1]),
    "nucleus": functools.partial(of_limits, operation="nucleus"),
    "kth_largest": functools.partial(of_limits, operation="kth_largest"),
}


@pytest.fixture(scope="module", autouse=True)
def _interpreter():
    # Loading it changes what JAX's caches are kept by: all is compiled again, once.
    segment_metadata(SLOTS, num_slots=2, implementation="pallas_interpret")


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_second_call_compiles_nothing(name, implementation, compiles):
    operation = OPERATIONS[name]
    first = operation(implementation)
    with compiles:
        second = operation(implementation)
    assert compiles.count == 0
    expected = operation("xla")
    for kernels, again, plain in zip(
        *(jax.tree.leaves(out) for out in (first, second, expected)), strict=True
    ):
        np.testing.assert_array_equal(kernels, again)
        np.testing.assert_allclose(kernels, plain, **TOLERANCE["float32"])
