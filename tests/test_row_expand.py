"""Few rows' expand: what it adds, and that it loads nothing from outside its arrays.

Interpret mode moves an index within bounds, and what is read there is dropped later: no
result tells. A GPU would read what lies beside.
"""

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
    _adapter_rows,
    _row_expand,
    lora_gated,
    lora_linear,
    lora_rotary,
    segment_metadata,
)
from punica_jax.pallas_kernels._fused import Shrunk
from tests.sgmv_cases import TOLERANCE, make_case, rarely

GPU = pytest.param("pallas_triton", marks=pytest.mark.gpu)
HEAD_DIM, PAGE_SIZE = 24, 16
HEADS, KV_HEADS = 4, 2
WIDTHS = {
    "plain": (72, 40),
    "normed": (136,),
    "gated": (72, 72),
    "rotary": tuple(HEAD_DIM * heads for heads in (HEADS, KV_HEADS, KV_HEADS)),
}


class RowCase(NamedTuple):
    """What a launch takes, and y with its adapters' product."""

    y: jax.Array
    shrunk: Shrunk
    expected: np.ndarray


def row_case(form: str, rows: int, max_pages: int) -> RowCase:
    """Adapters of every number of pages, with what is nowhere used made to show."""
    d_outs = WIDTHS[form]
    n = len(d_outs)
    ranks = [
        [RANK_PAGE * ((count + module) % (max_pages + 1)) for module in range(n)]
        for count in range(max_pages + 1)
    ]
    case = make_case(rows=rows, ranks=ranks, d_in=16, d_outs=d_outs, dtype="bfloat16")
    table = np.asarray(case.pool.page_table).copy()
    table[table == 2**30] = -7
    pool = dataclasses.replace(case.pool, page_table=jnp.asarray(table))
    slots = np.arange(rows, dtype=np.int32) % (len(ranks) + 1) - 1
    segments = segment_metadata(
        jnp.asarray(slots), num_slots=len(ranks), implementation="xla"
    )
    rng = np.random.default_rng(rows + max_pages)
    v = rng.standard_normal((3, rows, n, max_pages, RANK_PAGE)).astype(np.float32)
    expected = case.y.astype(np.float32)
    for entry, slot in enumerate(np.asarray(segments.slots[0])):
        row, start = int(segments.rows[0, entry]), 0
        for module, width in enumerate(d_outs):
            count = 0 if slot < 0 else int(pool.num_pages[slot, module])
            v[:, entry, module, count:] = np.nan
            for number in range(count):
                factor = v[:, entry, module, number].sum(0).astype(case.dtype)
                b = np.asarray(pool.b[table[slot, number], :, start : start + width])
                product = factor.astype(np.float32) @ b.astype(np.float32)
                expected[row, start : start + width] += product
            start += width
    v = jnp.asarray(v.reshape(3, rows, -1))
    return RowCase(jnp.asarray(case.y), Shrunk(v, pool, segments), expected)


def run(form: str, case: RowCase) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return what a form gives beside what it should."""
    y, shrunk, expected = case
    rows = y.shape[0]
    if form == "plain":
        own = _row_expand.expand(y, shrunk, interpret=True)
        return [(own, expected)]
    if form == "normed":
        norm = Norm(jnp.ones(y.shape[1], y.dtype), 1e-5)
        own, normed = _row_expand.normed_expand(y, shrunk, norm, interpret=True)
        return [(own, expected), (normed.x, expected)]
    if form == "gated":
        gate, up = np.split(expected, 2, axis=1)
        own = _row_expand.gated_expand(y, shrunk, interpret=True)
        return [(own, gate / (1 + np.exp(-gate)) * up)]
    ones = jnp.ones((rows, HEAD_DIM))  # cos of no angle, and sin
    kv_shape = (2, 1 + rows // PAGE_SIZE, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    page, offset = np.divmod(np.arange(rows, dtype=np.int32), PAGE_SIZE)
    q, kv_pages = _row_expand.rotary_expand(
        y,
        shrunk,
        (ones, 0 * ones),
        jnp.zeros(kv_shape, y.dtype),
        jnp.asarray(page),
        jnp.asarray(offset),
        interpret=True,
    )
    heads = expected.reshape(rows, -1, HEAD_DIM)
    kv = np.asarray(kv_pages)[:, page, :, offset].swapaxes(0, 1)
    kv = kv.reshape(2, rows, KV_HEADS, HEAD_DIM)
    k, v = np.split(heads[:, HEADS:], 2, axis=1)
    return [(q, heads[:, :HEADS]), (kv[0], k), (kv[1], v)]


def layer_of(form: str, rows: int, max_rank: int = 16, dtype: str = "bfloat16"):
    """Return a layer of the form, with a residual; it takes an implementation."""
    d_outs = WIDTHS[form]
    modules = range(len(d_outs))
    ranks = [[16 * (module != slot) for module in modules] for slot in (0, 9)]
    ranks.append([max(5, max_rank - 24)] * len(d_outs))
    options = {"d_in": 136, "d_outs": d_outs, "dtype": dtype, "max_rank": max_rank}
    case = make_case(rows=rows, ranks=ranks, **options)
    rng = np.random.default_rng(rows)
    slots = jnp.asarray(rng.integers(-1, 3, rows), jnp.int32)
    weight = jnp.asarray(rng.standard_normal((sum(d_outs), 136)) / 12, dtype)
    angle = jnp.asarray(rng.uniform(0, 6, (rows, HEAD_DIM // 2)), jnp.float32)
    turned = [own(jnp.concatenate([angle] * 2, axis=1)) for own in (jnp.cos, jnp.sin)]
    page, offset = jnp.divmod(jnp.arange(rows, dtype=jnp.int32), PAGE_SIZE)
    kv_pages = jnp.zeros((2, 1 + rows // PAGE_SIZE, KV_HEADS, PAGE_SIZE, HEAD_DIM))
    rotary = tuple(own.astype(dtype) for own in turned)
    cache = rotary, kv_pages.astype(dtype), page, offset

    def run(implementation: str):
        segments = segment_metadata(slots, num_slots=3, implementation=implementation)
        x, y = jnp.asarray(case.x), jnp.asarray(case.y)
        own = {"lora": (case.pool, segments), "residual": y}
        own["implementation"] = implementation
        if form == "rotary":
            return lora_rotary(x, weight, *cache, **own)
        return {"plain": lora_linear, "gated": lora_gated}[form](x, weight, **own)

    return run


@pytest.mark.parametrize("implementation", ["pallas_interpret", GPU])
@pytest.mark.parametrize(("rows", "max_rank"), [(70, 64), rarely(128, 16)])
@pytest.mark.parametrize("form", [rarely("plain"), "gated", rarely("rotary")])
def test_rows_that_xla_multiplied(form, rows, max_rank, implementation):
    run = layer_of(form, rows, max_rank)
    pairs = zip(*map(jax.tree.leaves, (run(implementation), run("xla"))), strict=True)
    for actual, expected in pairs:
        actual, expected = (np.asarray(own, np.float32) for own in (actual, expected))
        np.testing.assert_allclose(actual, expected, **TOLERANCE["bfloat16"])


@pytest.mark.parametrize("form", ["plain", "gated", "rotary"])
def test_which_rows_are_expanded_one_by_one(form):
    def is_by_row(*options) -> bool:
        run = functools.partial(layer_of(form, *options), "pallas_interpret")
        launches = str(jax.make_jaxpr(run)())
        name = "expand" if form == "plain" else form
        found = [own in launches for own in (f"lora_{name}_rows", "lora_shrink")]
        assert found[1] == (options[0] > 64)
        return found[0]

    assert is_by_row(64) and is_by_row(65) and is_by_row(128, 64) and is_by_row(64, 80)
    assert is_by_row(65, 16, "float16")
    others = [(129,), (65, 80), (65, 16, "float32")]
    assert not any(is_by_row(*options) for options in others)


@pytest.fixture
def outside(monkeypatch):
    """Return what is loaded from outside its array from now on, as text."""
    found, load = [], _adapter_rows.load

    def note(shape, mask, *indices):
        *indices, mask = np.broadcast_arrays(*indices, mask)
        for size, index in zip(shape, indices, strict=True):
            wrong = index[mask & ((index < 0) | (index >= size))]
            found.extend(f"{one} of {size} in {shape}" for one in wrong[:1])

    def checked(ref, mask):
        [indexer] = ref.transforms
        indices = [jnp.asarray(index) for index in indexer.indices]
        there = jnp.bool_(True) if mask is None else mask
        jax.debug.callback(
            functools.partial(note, ref.ref.shape), there, *indices, ordered=False
        )
        return load(ref, mask)

    for module in (_adapter_rows, _row_expand):
        monkeypatch.setattr(module, "load", checked)
    return found


@pytest.mark.parametrize("form", WIDTHS)
@pytest.mark.parametrize(
    ("rows", "max_pages"),
    # A row a program and four, of which the last has fewer; in place three of the
    # further pages at a time, and fewer at last.
    [
        (8, 3),
        rarely(13, 5),
        rarely(8, 1),
        rarely(9, 2),
        rarely(37, 2),
        (37, 4),
        rarely(16, 7),
    ],
)
def test_adapters_of_each_number_of_pages(form, rows, max_pages, outside):
    for actual, expected in run(form, row_case(form, rows, max_pages)):
        actual = np.asarray(actual, np.float32)
        np.testing.assert_allclose(actual, expected, **TOLERANCE["bfloat16"])
    jax.effects_barrier()
    assert not outside
