"""Operations outside of `jax.jit`: as quick the second time, and as good."""

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
from tests.sgmv_cases import NUMPY_DTYPE, TOLERANCE, make_case, rarely

ROWS, HEAD_DIM, D_IN, D_OUT = 4, 16, 64, 96
SLOTS = [1, -1, 0, 1]
KERNELS = pytest.param("pallas_triton", marks=pytest.mark.gpu), "pallas_interpret"
FLOAT32 = "lora", "gradient", "normed", "gated", "rotary"
# What few rows of 16 bits go by.
BFLOAT16 = *("linear", "normed", "gated", "rotary"), *("bare gated", "bare rotary")
WITHOUT_ADAPTERS = (
    *("segment_metadata", "decode", "prefill"),
    *("norm", "nucleus", "kth_largest"),
)
# Whatever the kernel, the same function calls it.
OFTEN = (
    *(("lora", "float32"), ("gradient", "float32"), ("normed", "bfloat16")),
    *(("segment_metadata", "float32"), ("prefill", "float32")),
)


def apply(name, dtype, implementation):
    """Call an operation on what is the same each time; `bare`, without adapters."""
    *bare, name = name.split()
    num_modules = {"gated": 2, "rotary": 3}.get(name, 1)
    d_outs = (D_OUT // num_modules,) * num_modules
    ranks = [[16] * num_modules, [8] * num_modules]
    case = make_case(rows=ROWS, ranks=ranks, d_in=D_IN, d_outs=d_outs, dtype=dtype)
    options = {"implementation": implementation}
    segments = segment_metadata(SLOTS, num_slots=2, **options)
    pair = None if bare else (case.pool, segments)
    x, y = jnp.asarray(case.x), jnp.asarray(case.y)
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((D_OUT, D_IN)) / np.sqrt(D_IN)
    weight = jnp.asarray(weight.astype(NUMPY_DTYPE[dtype]))
    norm = Norm(jnp.ones(D_OUT, dtype), 1e-5)

    def rotary():
        heads = d_outs[0] // HEAD_DIM
        angles = jnp.ones((ROWS, HEAD_DIM), jnp.float32)
        tables = jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)
        pages = jnp.zeros((2, 1, heads, 16, HEAD_DIM), dtype)
        place = jnp.zeros(ROWS, jnp.int32), jnp.arange(ROWS, dtype=jnp.int32)
        return lora_rotary(x, weight, tables, pages, *place, pair, **options)

    def attention(query_lens):
        batch = make_batch(query_lens, [20, 9], heads=2, kv_heads=1)
        longest = max(query_lens)
        return paged_attention(*batch.operands(), max_query_len=longest, **options)

    logits = jnp.asarray(rng.standard_normal((2, 300)), jnp.float32)
    halves = jnp.full(2, 0.5, jnp.float32)
    return {
        "segment_metadata": lambda: segments,
        "lora": lambda: lora(y, x, *pair, **options),
        "gradient": lambda: jax.grad(lambda x: lora(y, x, *pair, **options).sum())(x),
        "linear": lambda: lora_linear(x, weight, pair, **options),
        "normed": lambda: lora_normed(x, weight, norm, pair, **options)[0],
        "gated": lambda: lora_gated(x, weight, pair, **options),
        "rotary": rotary,
        "norm": lambda: rms_norm(y, norm.weight, eps=1e-5, **options),
        "decode": lambda: attention([1, 1]),
        "prefill": lambda: attention([17, 1]),
        "nucleus": lambda: nucleus(logits, halves, halves, **options),
        "kth_largest": lambda: kth_largest(logits, jnp.full(2, 7), **options),
    }[name]()


@pytest.fixture(scope="module", autouse=True)
def _interpreter():
    # Loading it changes what JAX's caches are kept by: all is compiled again, once.
    segment_metadata(SLOTS, num_slots=2, implementation="pallas_interpret")


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype) if (name, dtype) in OFTEN else rarely(name, dtype)
        for names, dtype in (
            ((*FLOAT32, *WITHOUT_ADAPTERS), "float32"),
            (BFLOAT16, "bfloat16"),
        )
        for name in names
    ],
)
def test_a_second_call_compiles_nothing(name, dtype, implementation, compiles):
    first = apply(name, dtype, implementation)
    with compiles:
        second = apply(name, dtype, implementation)
    assert compiles.count == 0
    expected = apply(name, dtype, "xla")
    for kernels, again, plain in zip(
        *(jax.tree.leaves(out) for out in (first, second, expected)), strict=True
    ):
        np.testing.assert_array_equal(kernels, again)
        kernels, plain = (np.asarray(out, np.float32) for out in (kernels, plain))
        np.testing.assert_allclose(kernels, plain, **TOLERANCE[dtype])
