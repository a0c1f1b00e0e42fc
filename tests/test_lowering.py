"""What the kernels become for an NVIDIA GPU, seen from a machine without one."""

import array
import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from punica_jax.batch import Batch, Buckets
from punica_jax.chunk import Chunk
from punica_jax.models import GroupPools, KvCache, Llama, LoraPools
from punica_jax.pallas_kernels import (
    _pair,
    lora,
    lora_gated,
    lora_linear,
    lora_rotary,
    pack_adapters,
    segment_metadata,
)
from punica_jax.pallas_kernels._digit_config import COUNTING, WEIGHING
from punica_jax.pallas_kernels._dispatch import has_warpgroups
from punica_jax.pallas_kernels._segments import DEFAULT_BLOCK_ROWS, max_tiles
from punica_jax.seats import Seats, draw
from punica_jax.step import run_step
from tests.tiny_checkpoint import CONFIG

H200 = AbstractMesh(
    (1,), ("x",), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu")
)
_OPERANDS = ("model", "cache", "pools", "batch")  # of a whole step
CALL = re.compile(
    r"stablehlo\.custom_call @__gpu\$xla\.gpu\.triton\((?P<operands>[^)]*)\)"
    r".*?name = \"(?P<name>\w+)\".*?: \((?P<types>.*?)\) ->"
)


def lower(function, *args):
    """Return each Triton call's kernel name and operand types, in program order."""
    args = jax.eval_shape(lambda *a: a, *args)
    with jax.sharding.use_abstract_mesh(H200):
        lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    return triton_calls(lowered.as_text())


def triton_calls(text):
    """Return a module's Triton calls, those of a function wherever it is called."""
    functions = {}
    for line in text.splitlines():
        if start := re.search(r"func\.func \w+ @([\w.]+)\(", line):
            body = functions[start[1]] = []
        elif "xla.gpu.triton" in line:
            call = CALL.search(line)
            assert call, line[:400]
            body.append((call["name"], call["types"]))
        elif called := re.search(r"= call @([\w.]+)\(", line):
            body.append(called[1])

    def calls(name):
        for call in functions[name]:
            yield from calls(call) if isinstance(call, str) else [call]

    return list(calls("main"))


def names(calls):
    return [name for name, _ in calls]


def names_with_segments(calls, rows, num_slots):
    """Return whose operands say which row has which adapter.

    A launch that takes rows one by one has their order and their slots; others have
    their order, and each tile's slot, first entry and last; a shrink has all of these.
    """
    tiles = max_tiles(rows, num_slots, DEFAULT_BLOCK_ROWS)
    assert tiles != rows, "arrays of rows and of tiles would look alike"

    def has_them(name, types):
        of_rows, of_tiles = (types.count(f"tensor<1x{n}xi32>") for n in (rows, tiles))
        wanted = (2, 0) if name.endswith("_rows") else (1, 3)
        wanted = (2, 3) if name == "lora_shrink" else wanted
        return (of_rows, of_tiles) == wanted

    return [name for name, types in calls if has_them(name, types)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [1, 33, 97])
def test_op(dtype, rows):
    pool = pack_adapters(jnp.zeros((3, 20, 40), dtype), jnp.zeros((3, 24, 20), dtype))

    def forward(y, x, pool, slots):
        segments = segment_metadata(slots, num_slots=3, implementation="pallas_triton")
        return lora(y, x, pool, segments, implementation="pallas_triton")

    args = (
        jnp.zeros((rows, 24), dtype),
        jnp.zeros((rows, 40), dtype),
        pool,
        jnp.zeros((rows,), jnp.int32),
    )
    calls = lower(forward, *args)
    products = ["lora_pair"] if rows <= 64 else ["lora_shrink", "lora_expand"]
    assert names(calls) == ["segment_metadata", *products]
    for _, types in calls[1:]:
        # The rows' order and the tile tables are operands, not constants.
        assert f"tensor<1x{rows}xi32>" in types
        tiles = {1: 1, 33: 5, 97: 9}[rows]
        assert types.count(f"tensor<1x{tiles}xi32>") >= 3

    def loss(y, x, pool, slots):
        return forward(y, x, pool, slots).astype(jnp.float32).sum()

    backward = names(lower(jax.grad(loss, (0, 1, 2), allow_int=True), *args))
    assert backward.count("lora_segment_outer") == 2
    assert backward.count("lora_shrink") == 2  # of x again, and of dy


@pytest.mark.parametrize("max_rank", [16, 64, 128])
def test_wide_product_of_many_adapters(max_rank):
    groups = GroupPools.zeros(
        64,
        (11008, 4096),
        num_layers=2,
        num_slots=64,
        num_pages=8,
        max_rank=max_rank,
        dtype=jnp.bfloat16,
    )

    def forward(y, x, pool, slots):
        segments = segment_metadata(slots, num_slots=64, implementation="pallas_triton")
        return lora(y, x, pool, segments, implementation="pallas_triton")

    y, x = jnp.zeros((64, 15104), jnp.bfloat16), jnp.zeros((64, 64), jnp.bfloat16)
    calls = lower(forward, y, x, groups.layer(1), jnp.zeros(64, jnp.int32))
    assert names(calls) == ["segment_metadata", "lora_pair"]
    segments = segment_metadata(jnp.zeros(64, jnp.int32), num_slots=64)
    crowd = _pair._config(groups.layer(1), segments).crowd
    assert crowd is None if max_rank > 64 else crowd.least_tiles <= segments.num_tiles


def test_metadata_of_many_rows_is_xlas():
    def launches(rows, num_slots):
        def build(slots):
            kernels = {"implementation": "pallas_triton"}
            return segment_metadata(slots, num_slots=num_slots, **kernels)

        return names(lower(build, jnp.zeros((rows,), jnp.int32)))

    for rows, num_slots in ((8192, 3), (8192, 64), (524, 1000)):
        assert launches(rows, num_slots) == ["segment_metadata"]
    for rows, num_slots in ((8193, 3), (8192, 65), (525, 1000)):
        assert launches(rows, num_slots) == []


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("rows", "max_rank"), [(9, 16), (9, 64), (9, 128), (37, 64)])
def test_epilogues(dtype, rows, max_rank):
    def pool(*d_outs):
        groups = GroupPools.zeros(
            64,
            d_outs,
            num_layers=1,
            num_slots=3,
            num_pages=4,
            max_rank=max_rank,
            dtype=dtype,
        )
        return groups.layer(0)

    def forward(x, gate_up, qkv, table, pages, at, slots, pools):
        kernels = {"implementation": "pallas_triton"}
        segments = segment_metadata(slots, num_slots=3, **kernels)
        cache = ((table, table), pages, at, at)
        own, other = ((pool, segments) for pool in pools)
        return [
            lora_gated(x, gate_up, **kernels),
            lora_gated(x, gate_up, own, **kernels),
            lora_rotary(x, qkv, *cache, **kernels),
            lora_rotary(x, qkv, *cache, other, **kernels),
        ]

    index = jnp.zeros(rows, jnp.int32)
    calls = lower(
        forward,
        jnp.zeros((rows, 64), dtype),
        jnp.zeros((2 * 344, 64), dtype),
        jnp.zeros((6 * 80, 64), dtype),
        jnp.zeros((rows, 80), dtype),
        jnp.zeros((2, 4, 1, 16, 80), dtype),
        index,
        index,
        (pool(344, 344), pool(320, 80, 80)),
    )
    # Of float32 the base products are XLA's, and rows are taken by tiles.
    few = dtype != jnp.float32
    if few:
        with_adapters = ["lora_gated_rows", "lora_rotary_rows", *["lora_project"] * 2]
        without = ["lora_project_gated", "lora_project_rotary"]
    else:
        with_adapters = ["lora_gated_expand", "lora_rotary_expand"]
        without, with_adapters = with_adapters, [*with_adapters, *["lora_shrink"] * 2]
    every = [*with_adapters, *without, "segment_metadata"]
    assert sorted(names(calls)) == sorted(every)
    assert sorted(names_with_segments(calls, rows, 3)) == sorted(with_adapters)


@pytest.fixture(params=["32 bits", "64 bits"])
def width(request):
    with jax.enable_x64(request.param == "64 bits"):
        yield


def whole_step(form, config=CONFIG):
    """Return a step of the tiny model, and its operands."""
    model = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    cache = KvCache.zeros(config, 8, 16, jnp.bfloat16)
    pools = LoraPools.zeros(
        config, num_slots=4, num_pages=8, max_rank=32, dtype=jnp.bfloat16
    )
    # 5, 160 and 100 in all: many, and as many as are still expanded one by one.
    rows = {"decode": 1, "prefill": 32, "short prefill": 20}[form]
    chunk = Chunk(
        tokens=array.array("i", [1] * rows), kv_len=rows, pages=[0, 1], slot=0
    )
    chunks = [chunk] * 5
    batch = Batch.of(chunks, Buckets(16, 256).of(chunks), pages_per_seq=2)
    step = functools.partial(run_step, implementation="pallas_triton")
    return step, (model, cache, pools, batch)


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("form", ["decode", "prefill", "short prefill"])
def test_whole_step(form):
    step, operands = whole_step(form)
    rows, seqs, _ = operands[-1].bucket
    lowered = lower(step, *operands)
    calls = names(lowered)
    found = collections.Counter(name for name in calls if "attention" not in name)
    attention = [name for name in calls if "attention" in name]
    assert {name for name in attention if form.split()[-1] in name}, attention
    layers = CONFIG.num_layers
    # Of few rows the first norm alone is a launch: expands and products do the others.
    # qkv, o, gate and up, down: few rows' products and shrinks are one launch. Few rows
    # are expanded one by one.
    few = {"lora_project": 3, "lora_expand_rows": 2, "lora_gated_rows": 1}
    if form == "decode":
        wanted = {name: layers * count for name, count in few.items()}
        wanted["lora_project"] += layers
        wanted |= {"lora_rotary_rows": layers, "rms_norm": 1, "segment_metadata": 1}
    else:
        # Behind the last attention there are as few rows as sequences.
        before = layers - 1
        plain, other = ("_rows", "_rows") if "short" in form else ("", "_expand")
        wanted = collections.Counter(few) + collections.Counter(
            {
                "lora_shrink": 4 * before + 1,
                f"lora_rotary{other}": layers,
                f"lora_expand{plain}": 2 * before,
                f"lora_gated{other}": before,
                "rms_norm": 2 * before + 1,
                "segment_metadata": 2,  # once a step, and of the last rows
            }
        )
    assert found == wanted
    # Every launch that multiplies by adapters takes the segments of its own rows.
    last = max(i for i, name in enumerate(calls) if name == "segment_metadata")
    for part, num_rows in (lowered[:last], rows), (lowered[last:], seqs):
        of_adapters = [name for name in names(part) if name.startswith("lora_")]
        assert names_with_segments(part, num_rows, 4) == of_adapters


@pytest.mark.usefixtures("width")
def test_heads_that_share_no_keys_have_a_launch_less():
    alone = dataclasses.replace(CONFIG, num_heads=2, num_kv_heads=2, head_dim=128)
    step, operands = whole_step("decode", alone)
    calls = names(lower(step, *operands))
    layers = alone.num_layers
    assert collections.Counter(calls) == {
        # o's is by warp groups.
        "lora_project": (3 if has_warpgroups() else 4) * layers,
        "paged_attention_decode_rotary": layers,
        "lora_expand_rows": 2 * layers,
        "lora_gated_rows": layers,
        "rms_norm": 1,
        "segment_metadata": 1,
    }


@pytest.mark.parametrize(
    "varying",
    ["batch", *(pytest.param(name, marks=pytest.mark.slow) for name in _OPERANDS[:3])],
)
@pytest.mark.parametrize(
    "form", ["decode", pytest.param("prefill", marks=pytest.mark.slow)]
)
def test_whole_step_under_shard_map_with_its_checks(form, varying):
    step, operands = whole_step(form)
    index = _OPERANDS.index(varying)

    def run(*operands):
        operands = list(operands)
        operands[index] = jax.tree.map(
            lambda leaf: lax.pcast(jnp.asarray(leaf), "x", to="varying"),
            operands[index],
        )
        return lax.psum(step(*operands).logits, "x")

    sharded = jax.shard_map(run, mesh=H200, in_specs=P(), out_specs=P())
    assert lower(sharded, *operands) == lower(step, *operands)


@pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("split", ["batch", "columns", "rows"])
def test_gradients_are_summed_over_a_mesh_as_those_of_xlas_form(split, dtype):
    mesh = AbstractMesh(
        (2,), ("x",), axis_types=(AxisType.Auto,), abstract_device=H200.abstract_device
    )
    # Of x, the weight, A, B, slots and what is added.
    specs, out = {
        "batch": ((P("x"), P(), P(), P(), P("x"), P("x")), P("x")),
        "columns": ((P(), P("x"), P(), P(None, "x"), P(), P(None, "x")), P(None, "x")),
        "rows": ((P(None, "x"), P(None, "x"), P(None, None, "x"), P(), P(), P()), P()),
    }[split]
    zeros = functools.partial(jnp.zeros, dtype=dtype)
    dense = zeros((8, 64)), zeros((96, 64)), zeros((3, 20, 64)), zeros((3, 96, 20))
    operands = (*dense, jnp.zeros(8, jnp.int32), zeros((8, 96)))

    def count(implementation):
        def layer(x, weight, a, b, slots, residual):
            segments = segment_metadata(
                slots, num_slots=3, implementation=implementation
            )
            adapters = pack_adapters(a, b), segments
            y = lora_linear(x, weight, adapters, implementation=implementation)
            return (lax.psum(y, "x") if split == "rows" else y) + residual

        def loss(*operands):
            sharded = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=out)
            return jnp.square(sharded(*operands).astype(jnp.float32)).sum()

        gradient = jax.jit(jax.grad(loss, (0, 1, 2, 3, 5)))
        with jax.sharding.use_abstract_mesh(mesh):
            lowered = gradient.trace(*operands).lower(lowering_platforms=("cuda",))
        text = lowered.as_text()
        assert ("xla.gpu.triton" in text) == (implementation == "pallas_triton")
        return text.count("stablehlo.all_reduce")

    assert count("pallas_triton") == count("xla") > 0


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 32])
def test_drawing(rows):
    vocab = 128256
    state = jax.eval_shape(lambda: Seats.zeros(rows, vocab))
    row, wide = jnp.zeros((rows,), jnp.int32), (rows, vocab)
    counts, logits = (jax.ShapeDtypeStruct(wide, t) for t in (jnp.int32, jnp.float32))
    pair = jnp.zeros((2, rows), jnp.int32)
    choose = functools.partial(draw, implementation="pallas_triton")
    calls = lower(choose, state, counts, row, logits, row, pair)
    digits = len(COUNTING.digits)
    assert names(calls) == [
        *["kth_largest_digit"] * digits,
        "kth_largest_limit",
        *["nucleus_digit"] * len(WEIGHING.digits),
        "nucleus_limit",
    ]
    for name, types in calls:
        # Every digit takes the logits as they are, and the partial sums of the last.
        assert (f"tensor<{rows}x{vocab}xf32>" in types) == name.endswith("_digit")
    # The vocabulary alone says how a row is cut.
    for config, searched in (COUNTING, calls[1:]), (WEIGHING, calls[digits + 2 :]):
        chunks = -(-vocab // config.chunk)
        for bits, (_, types) in zip(config.digits, searched, strict=False):
            assert f"tensor<{rows}x{chunks}x{1 << bits}xf32>" in types


def test_no_compiler_options_inside():
    # JAX refuses compiler options below another jit: each piece must nest.
    import punica_jax as pj

    pool = pack_adapters(jnp.ones((2, 4, 32)), jnp.ones((2, 32, 4)))
    layer = pj.LoraLinear(32, (32,), rngs=nnx.Rngs(0))

    @jax.jit
    def outer(layer, x, slots):
        segments = segment_metadata(slots, num_slots=2)
        y = jax.jit(lambda layer, x: layer(x, (pool, segments)))(layer, x)
        return jax.jit(pj.lora)(y, x, pool.a[:, 0], pool.b.swapaxes(1, 2), slots)

    out = outer(layer, jnp.ones((3, 32)), jnp.asarray([0, 1, -1], jnp.int32))
    base = layer(jnp.ones((3, 32)))
    # Each row's product is 32 * 4, twice; the idle row has none.
    expected = base + jnp.asarray([[256.0], [256.0], [0.0]])
    assert jnp.allclose(out, expected, rtol=1e-5)
