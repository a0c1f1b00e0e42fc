"""A program that walks some blocks of columns gives the bits of one of one block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.pallas_kernels import _sgmv_config, segment_metadata
from punica_jax.pallas_kernels._fused import Shrunk, gated_expand, rotary_expand
from punica_jax.pallas_kernels._sgmv import expand, shrink
from tests.sgmv_cases import make_case

IMPLEMENTATIONS = [
    "pallas_interpret",
    pytest.param("pallas_triton", marks=pytest.mark.gpu),
]
ROWS, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 70, 8, 4, 32, 16
WIDTHS = {
    "expand": (600, 328),  # five blocks of 128 and three: neither is a multiple of four
    "gated": (600, 600),
    "rotary": (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM),
}


def operands(form, ranks, implementation):
    d_outs = WIDTHS[form]
    case = make_case(rows=ROWS, ranks=ranks, d_in=40, d_outs=d_outs, dtype="bfloat16")
    rng = np.random.default_rng(1)
    slots = jnp.asarray(rng.integers(-1, len(ranks), ROWS), jnp.int32)
    segments = segment_metadata(
        slots, num_slots=len(ranks), implementation=implementation
    )
    interpret = implementation == "pallas_interpret"
    y, x = jnp.asarray(case.y), jnp.asarray(case.x)
    v = shrink(x, case.pool, segments, interpret=interpret)
    return y, Shrunk(v, case.pool, segments), rng


def launch_of(form, y, shrunk, rng, interpret):
    if form == "gated":
        return lambda: gated_expand(y, shrunk, interpret=interpret)
    if form == "expand":
        vectors = rng.standard_normal((2, shrunk.pool.num_slots, y.shape[1]))
        scale, bias = jnp.asarray(vectors, jnp.float32)
        residual = jnp.asarray(rng.standard_normal(y.shape), y.dtype)
        return lambda: expand(
            y,
            shrunk.v,
            shrunk.pool,
            shrunk.segments,
            scale=scale,
            bias=bias,
            residual=residual,
            interpret=interpret,
        )
    pages = 1 + ROWS // PAGE_SIZE
    angle = rng.uniform(0, 6, (ROWS, HEAD_DIM))
    rotary = jnp.asarray(np.cos(angle), y.dtype), jnp.asarray(np.sin(angle), y.dtype)
    kv_pages = rng.standard_normal((2, pages, KV_HEADS, PAGE_SIZE, HEAD_DIM))
    kv_pages = jnp.asarray(kv_pages, y.dtype)
    at = rng.permutation(pages * PAGE_SIZE)[:ROWS].astype(np.int32)
    page, offset = jnp.asarray(at // PAGE_SIZE), jnp.asarray(at % PAGE_SIZE)
    return lambda: rotary_expand(
        y, shrunk, rotary, kv_pages, page, offset, interpret=interpret
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("several_pages", [False, True])
@pytest.mark.parametrize("form", WIDTHS)
def test_walked_blocks_change_no_bit(form, several_pages, implementation, monkeypatch):
    modules = len(WIDTHS[form])
    # Modules without an adapter, too.
    ranks = [[16] * modules, [7] * modules, [0] + [16] * (modules - 1), [3] * modules]
    if several_pages:
        ranks[1] = [40] * modules
    y, shrunk, rng = operands(form, ranks, implementation)
    interpret = implementation == "pallas_interpret"
    launch = launch_of(form, y, shrunk, rng, interpret)

    def run(walked_rows):
        monkeypatch.setattr(_sgmv_config, "_WALKED_ROWS", walked_rows)
        grids = [
            eqn.params["grid_mapping"].grid
            for eqn in launches(jax.make_jaxpr(lambda: launch())().jaxpr)
        ]
        return grids, jax.jit(lambda: launch())()

    (plain_grids, plain), (grids, walked) = run(ROWS + 1), run(ROWS)
    walks = form == "rotary" or not several_pages
    assert (grids != plain_grids) == walks
    jax.tree.map(np.testing.assert_array_equal, plain, walked)


def launches(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        elif eqn.primitive.name == "custom_jvp_call":
            yield from launches(eqn.params["call_jaxpr"].jaxpr)
