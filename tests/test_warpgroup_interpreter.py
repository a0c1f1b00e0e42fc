"""Kernels for Hopper's warp groups, their threads and barriers too, without a GPU.

Their bits are those of Triton's form where sums are exact. (On a GPU all bits are.)
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from punica_jax.pallas_kernels import (
    NormedRows,
    _attention_warpgroups,
    _gated_product,
    _one_launch,
    _project,
    _project_cut,
    _project_warpgroups,
    _window_adapters,
)
from punica_jax.pallas_kernels._shrink import shrink
from tests.attention_cases import NOWHERE, assert_near, assert_same, make_batch
from tests.test_gated_product import make_layer, of_two, slots_of
from tests.test_project_warpgroups import (
    assert_same_sums,
    lora_of,
    operands_of,
    written,
)
from tests.warpgroup_interpreter import INTERPRETER, interpreted

pytestmark = [
    pytest.mark.slow,
    INTERPRETER,
    # Threads that wait for ever end with the process only.
    pytest.mark.timeout(300, method="thread"),
]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "num_programs", "whole"),
    [(2, 1, 64, 64, 3, False), (2, 2, 128, 16, 2, False), (2, 1, 64, 128, 2, True)],
)
def test_prefill_attention(
    heads, kv_heads, head_dim, page_size, num_programs, whole, monkeypatch
):
    query_lens, kv_lens = [3, 0, 40, 1, 133], [3, 0, 40, 100, 200]
    if whole:  # else both groups clear what lies past the end, with the same zeros
        query_lens, kv_lens = [128, 0, 40, 256], [128, 0, 640, 256]
    batch = make_batch(
        query_lens,
        kv_lens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype="bfloat16",
        padding=7,
    )
    operands = batch.operands(fill=np.nan, table_fill=NOWHERE)
    monkeypatch.setattr(_attention_warpgroups, "multiprocessors", lambda: num_programs)
    attend = functools.partial(
        _attention_warpgroups.warpgroup_attention.__wrapped__, scale=head_dim**-0.5
    )
    with interpreted(finds_races=whole):
        out = jax.jit(attend)(*operands)
    assert_near(out, batch.expected())


def whole_numbers(operands, d_in):
    """Return operands of `operands_of`, whose sums are exact in any order."""
    x, weight, options = operands
    if isinstance(x, NormedRows):
        x = dataclasses.replace(x, x=jnp.round(2 * x.x))
    else:
        x = jnp.round(2 * x)
    return x, jnp.round(2 * d_in**0.5 * weight), jax.tree.map(jnp.round, options)


class TestFewRows:
    @pytest.fixture(autouse=True)
    def on_six_multiprocessors(self, monkeypatch):
        for module in (_project_cut, _project_warpgroups):
            monkeypatch.setattr(module, "multiprocessors", lambda: 6)

    @pytest.mark.parametrize(
        ("rows", "d_in", "d_outs", "options"),
        [
            (16, 256, (256,), ()),
            (40, 128, (96, 32), ("bias", "residual")),
            (24, 384, (64, 32, 32), ("squares",)),
            (64, 512, (128, 128), ("residual",)),
            (64, 640, (192,), ()),
        ],
    )
    def test_product_and_shrink(self, rows, d_in, d_outs, options):
        self.check(rows, d_in, d_outs, options)

    @pytest.mark.parametrize(
        ("d_outs", "slots"),
        [
            ((128, 128), [4] * 64),
            ((64, 32, 32), [0, 1, 2, 4, 5] + [3] * 35),
            ((128,), [5] * 8 + [0] * 8 + [-1] * 8 + [5] * 8),
        ],
        ids=["one adapter", "a prompt", "two of several runs"],
    )
    def test_adapters_of_many_rows(self, d_outs, slots):
        self.check(len(slots), 512, d_outs, (), slots)

    def check(self, rows, d_in, d_outs, options, slots=None):
        x, weight, options = whole_numbers(
            operands_of(rows, d_in, sum(d_outs), options=options), d_in
        )
        pool, segments = lora_of(rows, d_in, d_outs, slots=slots)
        pool = dataclasses.replace(pool, a=jnp.round(2 * pool.a))
        lora = pool, segments
        assert _project_warpgroups.fits(x, weight, lora, options)
        project = functools.partial(
            _project_warpgroups._launch.__wrapped__, gated=False
        )
        # Fewer than 64 are multiplied with what lies past them, for nobody.
        with interpreted(finds_races=rows == 64):
            y, v = jax.jit(project)(x, weight, lora, options)
        expected, expected_v = _project.project(
            x, weight, lora, **options, interpret=True
        )
        assert_same(y, expected)
        assert_same_sums(v, expected_v, written(*lora))

    def test_gated(self, monkeypatch):
        operands = operands_of(64, 1024, 128, options=("squares",))
        x, weight, options = whole_numbers(operands, 1024)
        monkeypatch.setattr(_project_warpgroups, "_MAX_ROWS_ALONE", 64)
        assert _project_warpgroups.fits(x, weight, None, options, gated=True)
        gated = functools.partial(_project_warpgroups._launch.__wrapped__, gated=True)
        with interpreted(finds_races=True):
            (h,) = jax.jit(gated)(x, weight, None, options)
        expected = _one_launch.gated(x, weight, interpret=True)
        assert_same(h, expected)


def test_many_rows_gated_product(monkeypatch):
    """A cluster's programs share the weight; the runs of adapters end anywhere."""
    monkeypatch.setattr(_gated_product, "multiprocessors", lambda: 2)
    slots = slots_of([(0, 100), (-1, 60), (3, 30), (2, 66)], rows=256)
    x, weight, pool, segments = make_layer(slots, width=128, d_in=384)
    v = shrink(x, pool, segments, interpret=True)
    operands = _window_adapters.adapter_operands(v, pool, segments)
    with interpreted(finds_races=True):
        h = jax.jit(_gated_product._launch)(x, weight, operands)
    assert_same(h, of_two(x, weight, pool, segments, interpret=True))
