"""Adapters on the device: pages and tables, and that loading compiles nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import monitoring

from punica_jax.adapters import AdapterTable
from punica_jax.device_pools import DevicePools
from punica_jax.models._config import MODULE_GROUPS, MODULE_PATHS
from punica_jax.models._lora import LoraPools, set_slot, slot_tables, write_page
from punica_jax.models._peft import Adapter, read_adapter, save_adapter
from punica_jax.pallas_kernels import LoraPool, lora, segment_metadata
from tests.adapter_cases import CONFIG, WIDTHS, Factors, in_pools, random_factors

NUM_SLOTS, NUM_PAGES, MAX_RANK = 3, 6, 40
ALL = tuple(WIDTHS)


def make_pools(dtype=jnp.float32) -> LoraPools:
    return LoraPools.zeros(
        CONFIG,
        num_slots=NUM_SLOTS,
        num_pages=NUM_PAGES,
        max_rank=MAX_RANK,
        dtype=dtype,
    )


def make_table() -> AdapterTable:
    return AdapterTable(NUM_SLOTS, dict.fromkeys(MODULE_GROUPS, NUM_PAGES), MAX_RANK)


@functools.cache
def programs():
    """Return `write_page` and `set_slot` as the runner jits them."""
    write = jax.jit(write_page, static_argnames="group", donate_argnames="pools")
    return write, jax.jit(set_slot, donate_argnames="pools")


def load(pools, table, name, adapter: Adapter, *, allow_nan=False):
    """Load one adapter as the runner does: pages, flags, and only then the slot."""
    write, point = programs()
    needs = {group: adapter.num_pages(group) for group in MODULE_GROUPS}
    placement = table.allocate(name, needs, adapter.rank)
    flags = []
    for group, pages in placement.pages.items():
        for index, page in enumerate(pages):
            arrays = adapter.page(group, index)
            pools, finite = write(pools, group, np.int32(page), *arrays)
            flags.append(finite)
    if not (allow_nan or all(jax.device_get(flags))):
        table.cancel(placement)
        return pools, False
    counts = {group: adapter.counts(group) for group in MODULE_GROUPS}
    tables = slot_tables(pools, placement.pages, counts)
    pools = point(pools, np.int32(placement.slot), tables)
    table.publish(placement, adapter.report)
    return pools, True


def unload(pools, table, name):
    slot = table.free(name).slot
    return programs()[1](pools, np.int32(slot), slot_tables(pools))


def make_adapter(path, factors: Factors, dtype=np.float32, **fields) -> Adapter:
    save_adapter(path, CONFIG, factors, **fields)
    return read_adapter(path, CONFIG, dtype=dtype)


def by_layer(array: jax.Array) -> np.ndarray:
    """Return a pools' array as `[layers, pages, ...]`."""
    return np.asarray(array).reshape(CONFIG.num_layers, -1, *array.shape[1:])


@jax.jit
def delta(view: LoraPool, slot: jax.Array) -> jax.Array:
    """Read `scale B A [d_out_total, d_in]` of one layer's group, by the op itself."""
    slots = jnp.full(view.d_in, slot, jnp.int32)
    segments = segment_metadata(slots, num_slots=NUM_SLOTS, implementation="xla")
    x = jnp.eye(view.d_in, dtype=view.dtype)
    y = jnp.zeros((view.d_in, view.d_out), view.dtype)
    return lora(y, x, view, segments, implementation="xla").T


def deltas(pools: LoraPools, slot: int) -> dict[tuple[int, str], np.ndarray]:
    """Read `scale B A` of every layer and module out of the pools."""
    found = {}
    for layer in range(CONFIG.num_layers):
        for group, modules in MODULE_GROUPS.items():
            view = getattr(pools.layer(layer), group)
            whole = np.asarray(delta(view, np.int32(slot)))
            parts = np.split(whole, np.cumsum(view.d_outs)[:-1])
            for module, part in zip(modules, parts, strict=True):
                found[layer, MODULE_PATHS[module]] = part
    return found


def assert_holds(pools: LoraPools, slot: int, factors: Factors) -> None:
    """Assert that a slot computes these LoRAs, and nothing anywhere else."""
    found = deltas(pools, slot)
    assert found.keys() == all_ranks(1).keys()
    for key, part in found.items():
        d_in, d_out = WIDTHS[key[1]]
        expected = np.zeros((d_out, d_in), np.float32)
        if key in factors:
            a, b = factors[key]
            expected = b @ a
        np.testing.assert_allclose(part, expected, atol=1e-5, err_msg=str(key))


def all_ranks(rank: int, modules=ALL) -> dict[tuple[int, str], int]:
    return {(layer, m): rank for layer in range(CONFIG.num_layers) for m in modules}


# --- shapes ---------------------------------------------------------------------------


def test_shapes_of_empty_pools():
    pools = make_pools(jnp.bfloat16)
    assert (pools.num_layers, pools.num_slots, pools.num_pages) == (3, 3, 6)
    assert (pools.max_pages, pools.max_rank) == (3, 48)
    assert pools.dtype == jnp.bfloat16
    shapes = {
        "qkv": ((18, 3, 16, 24), (18, 16, 64)),
        "o": ((18, 1, 16, 32), (18, 16, 24)),
        "gate_up": ((18, 2, 16, 24), (18, 16, 80)),
        "down": ((18, 1, 16, 40), (18, 16, 24)),
    }
    for group, (a_shape, b_shape) in shapes.items():
        pool = getattr(pools.layer(2), group)
        assert (pool.a.shape, pool.b.shape) == (a_shape, b_shape)
        assert pool.page_table.shape == (3, 3)
        assert pool.num_pages.shape == (9, len(MODULE_GROUPS[group]))
        assert (pool.num_layers, pool.num_slots, pool.pages_per_layer) == (3, 3, 6)
        assert (int(pool.layer_index[0]), int(pool.first_page)) == (2, 12)
        assert pool.d_outs == CONFIG.d_outs(group)
        assert pool.page_table.dtype == pool.num_pages.dtype == jnp.int32


@pytest.mark.parametrize("name", ["num_slots", "num_pages", "max_rank"])
def test_sizes_must_be_positive(name):
    sizes = {"num_slots": 1, "num_pages": 1, "max_rank": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1"):
        LoraPools.zeros(CONFIG, **sizes)


def test_a_view_copies_nothing():
    pools = make_pools()
    view = pools.layer(1).down
    assert view.a is pools.down.a and view.b is pools.down.b
    assert view.num_pages is pools.down.num_pages


@pytest.mark.parametrize("index", [-1, 3])
def test_no_view_of_a_layer_that_is_none(index):
    with pytest.raises(AssertionError):
        make_pools().layer(index)


def test_one_layer_needs_no_number():
    config = dataclasses.replace(CONFIG, num_layers=1)
    pools = LoraPools.zeros(config, num_slots=2, num_pages=3, max_rank=16)
    assert pools.layer(0).qkv.layer is None


def test_pools_pass_through_jit_as_a_pytree():
    pools = jax.jit(lambda pools: pools)(make_pools())
    assert pools.down.d_outs == (24,)
    # However many layers there are: each costs the host time at every launch.
    assert len(jax.tree.leaves(pools)) == 4 * len(MODULE_GROUPS) == 16


# --- loading --------------------------------------------------------------------------


def test_adapters_of_many_shapes_side_by_side(tmp_path):
    """Rank 40 on everything, q and v of rank 4, and an irregular one."""
    cases = {
        "wide": random_factors(all_ranks(40), seed=1),
        "narrow": random_factors(
            all_ranks(4, ("self_attn.q_proj", "self_attn.v_proj")), seed=2
        ),
        "odd": random_factors(
            {(0, "self_attn.k_proj"): 17, (2, "mlp.up_proj"): 1}, seed=3
        ),
    }
    pools, table = make_pools(), make_table()
    for name, factors in cases.items():
        adapter = make_adapter(tmp_path / name, factors, use_rslora=True, lora_alpha=1)
        pools, loaded = load(pools, table, name, adapter)
        assert loaded
    table.check_integrity()
    for name, factors in cases.items():
        scaled = {
            key: (a, b / np.sqrt(np.float32(a.shape[0])))
            for key, (a, b) in factors.items()
        }
        assert_holds(pools, table.slot_of(name), scaled)


def test_replace_and_unload(tmp_path):
    first = random_factors(all_ranks(24), seed=1)
    second = random_factors(all_ranks(3, ALL[:1]), seed=2)
    other = random_factors(all_ranks(5), seed=3)
    pools, table = make_pools(), make_table()
    for name, factors in (("x", first), ("y", other), ("x", second)):
        pools, _ = load(pools, table, name, make_adapter(tmp_path, factors))
    assert table.slot_of("x") == 0
    assert_holds(pools, 0, second)
    assert_holds(pools, 1, other)
    pools = unload(pools, table, "x")
    table.check_integrity()
    assert_holds(pools, 0, {})
    assert_holds(pools, 1, other)


def test_writing_a_page_makes_nothing_visible(tmp_path):
    pools = make_pools()
    adapter = make_adapter(tmp_path, random_factors(all_ranks(8)))
    for page in range(NUM_PAGES):
        arrays = adapter.page("qkv", 0)
        pools, _ = programs()[0](pools, "qkv", np.int32(page), *arrays)
    assert_holds(pools, 0, {})


def test_a_page_is_written_where_it_belongs_and_nowhere_else(tmp_path):
    adapter = make_adapter(tmp_path, random_factors(all_ranks(24)), jnp.bfloat16)
    a_page, b_page = in_pools(adapter, "gate_up", 1)
    pools, finite = programs()[0](
        make_pools(jnp.bfloat16), "gate_up", np.int32(4), *adapter.page("gate_up", 1)
    )
    assert finite.dtype == jnp.bool_ and finite
    for layer in range(CONFIG.num_layers):
        for leaf, page in ((pools.gate_up.a, a_page), (pools.gate_up.b, b_page)):
            found = by_layer(leaf)[layer]
            np.testing.assert_array_equal(found[4], page[layer])
            assert page[layer].any() and not np.delete(found, 4, axis=0).any()
    for group in ("qkv", "o", "down"):
        own = pools.group(group)
        assert not any(leaf.any() for leaf in (own.a, own.b, own.num_pages))
        assert (own.page_table == -1).all()
    assert (pools.gate_up.page_table == -1).all()
    assert not pools.gate_up.num_pages.any()


DTYPES = [np.dtype(kind) for kind in ("float32", "float16", ml_dtypes.bfloat16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("file_dtype", [*DTYPES, np.dtype(np.float64)], ids=str)
@pytest.mark.parametrize("rank", [3, 16, 40])
@pytest.mark.parametrize("alpha", [5.0, -0.7])
def test_b_is_scaled_in_float32_and_rounded_once(
    tmp_path, dtype, file_dtype, rank, alpha
):
    """To the last bit, and the sign of every zero, wherever it is multiplied."""
    factors = {
        key: (a.astype(file_dtype), b.astype(file_dtype))
        for key, (a, b) in random_factors(all_ranks(rank, ALL[:3])).items()
    }
    q, k = (0, "self_attn.q_proj"), (0, "self_attn.k_proj")
    factors[q][1][0, :2] = 0.0, -0.0
    factors[k][1][:] *= 1e-7  # float16 below its normal numbers
    fields = {"lora_alpha": alpha, "alpha_pattern": {"k_proj": 3.0}}
    adapter = make_adapter(tmp_path, factors, dtype, **fields)
    pools = make_pools(dtype)
    found = []
    for index in range(adapter.num_pages("qkv")):
        arrays = adapter.page("qkv", index)
        pools, _ = programs()[0](pools, "qkv", np.int32(index), *arrays)
        found.append(by_layer(pools.qkv.b)[:, index])
    found = np.concatenate(found, axis=1)
    expected = np.zeros_like(found)
    columns = dict(zip(ALL[:3], ((0, 32), (32, 48), (48, 64)), strict=True))
    for (layer, module), (_, b) in factors.items():
        scale = np.float32((3.0 if module == k[1] else alpha) / rank)
        scaled = (b.astype(np.float32) * scale).astype(dtype)
        expected[layer, :rank, slice(*columns[module])] = scaled.T
    bits = f"u{dtype.itemsize}"
    np.testing.assert_array_equal(found.view(bits), expected.view(bits))


# --- no recompiling, no copying -------------------------------------------------------


@pytest.fixture
def compiles():
    """Count XLA compilations while a test runs."""
    events = []

    def listen(event: str, duration_s: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(duration_s)

    monitoring.register_event_duration_secs_listener(listen)
    yield events
    monitoring.unregister_event_duration_listener(listen)


def test_the_compile_counter_counts(compiles):
    jax.jit(lambda x: x * 3.25 + 1)(np.float32(1))
    assert len(compiles) == 1


def test_one_program_a_group_and_one_for_the_tables(compiles):
    # Sizes that no other test has: jit's cache is the process's.
    pools = LoraPools.zeros(CONFIG, num_slots=2, num_pages=7, max_rank=16)
    write, point = programs()
    compiles.clear()
    for group in MODULE_GROUPS:
        old = pools.group(group)
        a_page = np.zeros((3, *old.a.shape[1:]), np.float32)
        b_page = np.zeros((3, *old.b.shape[:0:-1]), np.float32)
        scale = np.ones((3, len(old.d_outs)), np.float32)
        pools, _ = write(pools, group, np.int32(0), a_page, b_page, scale)
    point(pools, np.int32(0), slot_tables(pools))
    assert len(compiles) == len(MODULE_GROUPS) + 1


def test_loading_replacing_and_unloading_compile_nothing(tmp_path, compiles):
    pools, table = make_pools(), make_table()
    warm = make_adapter(tmp_path, random_factors(all_ranks(16)))
    pools, _ = load(pools, table, "warm", warm)
    write, point = programs()
    sizes = write._cache_size(), point._cache_size()
    compiles.clear()
    for seed, ranks in enumerate(
        [
            all_ranks(1),
            all_ranks(40),
            all_ranks(17, ALL[2:5]),
            {(1, "mlp.down_proj"): 30},
        ]
    ):
        adapter = make_adapter(tmp_path, random_factors(ranks, seed), lora_alpha=3)
        pools, loaded = load(pools, table, "x", adapter)
        assert loaded
    pools = unload(pools, table, "x")
    pools = unload(pools, table, "warm")
    assert compiles == []
    assert (write._cache_size(), point._cache_size()) == sizes


def test_donated_pools_are_updated_in_place(tmp_path):
    write, point = programs()
    adapter = make_adapter(tmp_path, random_factors(all_ranks(4)))
    old = make_pools()
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(old)]
    new, _ = write(old, "down", np.int32(1), *adapter.page("down", 0))
    new = point(new, np.int32(0), slot_tables(new))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(new)] == addresses


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("group", MODULE_GROUPS)
def test_a_write_has_no_room_for_a_copy_of_the_pools(group, dtype):
    """XLA may copy a donated array and copy it back: its address would be the same."""
    sizes = {"num_slots": 500, "num_pages": 500, "max_rank": 16}
    pools = LoraPools.zeros(CONFIG, dtype=dtype, **sizes)
    own, layers = pools.group(group), CONFIG.num_layers
    lanes, d_out = own.b.shape[1:]
    page = [(layers, *own.a.shape[1:]), (layers, d_out, lanes)]
    page = [jax.ShapeDtypeStruct(shape, dtype) for shape in page]
    scale = jax.ShapeDtypeStruct((layers, len(own.d_outs)), jnp.float32)
    if dtype == jnp.bfloat16 and jax.__version_info__ < (0, 11):
        pytest.skip("JAX 0.10 scatters bfloat16 as float32 on a CPU")
    # Of leaves: a tree of what JAX says of its arguments has no arrays in it.
    leaves, structure = jax.tree.flatten(pools)

    def lower(function, *args):
        def flat(leaves, *args):
            return function(jax.tree.unflatten(structure, leaves), *args)

        return jax.jit(flat, donate_argnums=0).lower(leaves, *args)

    def write(pools, *args):
        return write_page(pools, group, *args)

    lowered = [
        lower(write, np.int32(0), *page, scale),
        lower(set_slot, np.int32(0), slot_tables(pools)),
    ]
    for program, array in zip(lowered, (own.b, own.num_pages), strict=True):
        analysis = program.compile().memory_analysis()
        assert analysis is not None
        assert analysis.temp_size_in_bytes < array.size * array.dtype.itemsize / 2


def test_placing_is_writing_and_showing_and_compiles_nothing(tmp_path, compiles):
    adapter = make_adapter(tmp_path, random_factors(all_ranks(20)), lora_alpha=3)
    pages = {group: (4, 1) for group in MODULE_GROUPS}
    written, placed = DevicePools(make_pools()), DevicePools(make_pools())
    compiles.clear()
    assert written.write(adapter, pages)
    written.show(2, adapter, pages)
    assert placed.place(placed.stage(adapter, 2, pages))()
    placed.clear_slot(0)
    assert compiles == []
    both = jax.tree.leaves(written.pools), jax.tree.leaves(placed.pools)
    for one, other in zip(*both, strict=True):
        np.testing.assert_array_equal(one, other)
    assert_holds(
        placed.pools,
        2,
        {
            key: (a, b * np.float32(3 / 20))
            for key, (a, b) in random_factors(all_ranks(20)).items()
        },
    )


# --- weights that are not finite ------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("half", [0, 1])
def test_one_bad_value_refuses_the_adapter(tmp_path, bad, half):
    """The old adapter of that name, and its neighbours, are as they were."""
    good = random_factors(all_ranks(20), seed=1)
    pools, table = make_pools(), make_table()
    pools, _ = load(pools, table, "x", make_adapter(tmp_path, good))
    factors = random_factors(all_ranks(20), seed=2)
    factors[2, "mlp.down_proj"][half][-1, -1] = bad
    adapter = make_adapter(tmp_path, factors)
    pools, loaded = load(pools, table, "x", adapter)
    assert not loaded
    table.check_integrity()
    assert table.slot_of("x") == 0
    assert_holds(pools, 0, good)  # beside pages that still hold the bad value
    assert_holds(pools, 1, {})


@pytest.mark.parametrize("module", [ALL[0], ALL[-1]])
@pytest.mark.parametrize("row", [0, -1])
def test_one_bad_page_of_many_is_told_of(tmp_path, module, row):
    factors = random_factors(all_ranks(20))
    factors[1, module][0][row, 0] = np.nan
    adapter = make_adapter(tmp_path, factors)
    device, pages = DevicePools(make_pools()), dict.fromkeys(MODULE_GROUPS, (4, 1))
    assert not device.write(adapter, pages)
    assert not device.place(device.stage(adapter, 1, pages))()


def test_bad_values_may_be_allowed(tmp_path):
    factors = random_factors(all_ranks(2, ALL[:1]))
    factors[1, "self_attn.q_proj"][0][0, 0] = np.nan
    adapter = make_adapter(tmp_path, factors)
    pools, loaded = load(make_pools(), make_table(), "x", adapter, allow_nan=True)
    assert loaded
    bad = {key for key, part in deltas(pools, 0).items() if np.isnan(part).any()}
    assert bad == {(1, "self_attn.q_proj")}


def test_scale_that_overflows_float16_is_refused(tmp_path):
    factors = random_factors(all_ranks(4))
    adapter = make_adapter(tmp_path, factors, np.float16, lora_alpha=1e7)
    _, loaded = load(make_pools(jnp.float16), make_table(), "x", adapter)
    assert not loaded


# --- tables ---------------------------------------------------------------------------


def test_slot_tables():
    pools = make_pools()
    pages = {"qkv": (4, 2), "o": (), "gate_up": (0,), "down": (5,)}
    counts = {
        group: np.full((3, len(modules)), len(pages[group]), np.int32)
        for group, modules in MODULE_GROUPS.items()
    }
    tables = slot_tables(pools, pages, counts)
    assert tables.keys() == MODULE_GROUPS.keys()
    np.testing.assert_array_equal(tables["qkv"][0], [4, 2, -1])
    np.testing.assert_array_equal(tables["gate_up"][1], counts["gate_up"])
    for row, used in slot_tables(pools).values():
        assert row.dtype == used.dtype == np.int32
        assert (row == -1).all() and not used.any()
