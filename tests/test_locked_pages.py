"""Memory that a device copies from directly: who has it, and that it holds the same."""

import asyncio
import gc
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import punica_jax as pj
from punica_jax import device_pools, locked_pages
from punica_jax.device_pools import DevicePools
from punica_jax.locked_pages import LockedPages
from punica_jax.memory import locked_bytes
from punica_jax.models import (
    MODULE_GROUPS,
    Adapter,
    HostBuffer,
    LoraPools,
    PageShape,
    make_adapter,
)
from tests.adapter_cases import CONFIG, WIDTHS, random_factors
from tests.engine_cases import GREEDY, completions, files, make_engine, run

SIZES = [PageShape.of(CONFIG, group).size(np.float32) for group in MODULE_GROUPS]
SET_BYTES = 4 * sum(SIZES)  # of one rank page in each group


def locked_pages_for(num_sets):
    device = jax.devices()[0]
    return LockedPages(device, SIZES, np.float32, int(num_sets * SET_BYTES))


def num_free(pages):
    """Return the free pages of each group, all of which have as many."""
    [num] = set(pages.num_free.values())
    return num


def adapter_of(seed=0, rank=16, empty=HostBuffer.empty, modules=tuple(WIDTHS)):
    ranks = {(layer, one): rank for layer in range(3) for one in modules}
    factors = random_factors(ranks, seed)
    return make_adapter(CONFIG, factors, dtype=np.float32, empty=empty, lora_alpha=3)


def test_sizes_are_those_of_the_adapters():
    assert len(set(SIZES)) == len(SIZES)
    assert adapter_of().nbytes == SET_BYTES
    assert adapter_of(rank=20).nbytes == 2 * SET_BYTES


def test_what_is_read_into_it_is_the_same_there_and_on_the_device():
    pages = locked_pages_for(2)
    locked, ordinary = adapter_of(empty=pages.empty, rank=20), adapter_of(rank=20)
    assert locked.is_locked and not ordinary.is_locked and num_free(pages) == 0
    assert locked.digest() == ordinary.digest() and locked.nbytes == ordinary.nbytes
    assert locked.report == ordinary.report
    for group in MODULE_GROUPS:
        both = locked.buffers(group), ordinary.buffers(group)
        for one, other in zip(*both, strict=True):
            assert one.source.sharding.memory_kind == "pinned_host"
            np.testing.assert_array_equal(np.asarray(one.source), other.array)


def test_pages_are_free_when_the_last_array_is_gone():
    pages = locked_pages_for(1)
    adapter = adapter_of(empty=pages.empty)
    assert num_free(pages) == 0
    part = adapter.page("qkv", 0).b[1:, :3]
    want, digest = part.copy(), adapter.digest()
    adapter.report.complete()  # it has the weights until then
    del adapter
    gc.collect()
    assert sorted(pages.num_free.values()) == [0, 1, 1, 1]
    other = adapter_of(1, empty=pages.empty)  # has three of them
    assert not other.is_locked and other.digest() != digest
    np.testing.assert_array_equal(part, want)
    other.report.complete()
    del other, part
    gc.collect()
    assert num_free(pages) == 1


def test_once_it_is_used_up_memory_is_ordinary():
    pages = locked_pages_for(1)
    first, second = (adapter_of(seed, empty=pages.empty) for seed in (1, 2))
    assert first.is_locked
    assert not any(
        buffer.is_locked for one in MODULE_GROUPS for buffer in second.buffers(one)
    )
    assert second.digest() == adapter_of(2).digest()
    assert pages.empty(7, np.float32).array.shape == (7,)  # nobody's page
    assert locked_pages_for(0.9).num_free == dict.fromkeys(SIZES, 0)


def test_a_machine_may_have_less(monkeypatch):
    put, num_left = jax.device_put, iter(range(5))

    def scarce(*args):
        if next(num_left, None) is None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        return put(*args)

    monkeypatch.setattr(locked_pages.jax, "device_put", scarce)
    assert sorted(locked_pages_for(3).num_free.values()) == [1, 1, 1, 2]


@pytest.fixture
def always(monkeypatch):
    """Let there be such memory for two adapters of rank 16, also on a CPU."""
    monkeypatch.setattr(device_pools, "locked_bytes", lambda *_: 2 * SET_BYTES)


def test_placing_from_it_is_the_same_and_compiles_nothing(compiles, always):
    sizes = {"num_slots": 3, "num_pages": 6, "max_rank": 40}
    pages = dict.fromkeys(MODULE_GROUPS, (4, 1))
    both = [DevicePools(LoraPools.zeros(CONFIG, **sizes)) for _ in range(2)]
    empty = both[0].lock(np.inf)
    adapters = [adapter_of(rank=20, empty=one) for one in (empty, HostBuffer.empty)]
    assert [one.is_locked for one in adapters] == [True, False]
    use = jax.jit(lambda pools: [leaf + 1 for leaf in jax.tree.leaves(pools)])
    use(both[0].pools)
    with compiles:
        for device, adapter in zip(both, adapters, strict=True):
            assert device.place(device.stage(adapter, 2, pages))()
        # A program that takes the pools must not take them for others.
        use(both[0].pools)
    assert compiles.count == 0
    pools = [jax.tree.leaves(device.pools) for device in both]
    for one, other in zip(*pools, strict=True):
        np.testing.assert_array_equal(one, other)


def test_those_of_a_few_groups_have_pages_of_these(always):
    device = DevicePools(LoraPools.zeros(CONFIG, num_slots=1, num_pages=2, max_rank=16))
    adapter = adapter_of(empty=device.lock(np.inf), modules=("self_attn.q_proj",))
    assert adapter.is_locked
    pages = {group: range(adapter.num_pages(group)) for group in MODULE_GROUPS}
    assert device.place(device.stage(adapter, 0, pages))()
    assert jnp.any(device.pools.qkv.a) and not jnp.any(device.pools.o.a)


@pytest.mark.slow
def test_an_engine_reads_into_it_and_lets_it_go(
    tmp_path_factory, monkeypatch, compiles
):
    root = files(tmp_path_factory)
    monkeypatch.setattr(device_pools, "locked_bytes", lambda *_: 600_000)
    with make_engine(root) as engine:
        locked = engine._sources.empty.__self__
        total = sum(locked.num_free.values())
        assert total

        async def all_of(names):
            asked = [engine.generate("hello", name, GREEDY) for name in names]
            return await asyncio.gather(*map(completions, asked))

        want = run(all_of("abc"))
        assert sum(locked.num_free.values()) < total
        with compiles:
            run(all_of("defg"))  # the slots are theirs now
            assert run(all_of("abc")) == want
        assert compiles.count == 0
        hosts = [version.host for version in engine.adapters.values()]
        assert any(isinstance(host, Adapter) and host.is_locked for host in hosts)
        del hosts
        for name in "abcdefg":
            run(engine.unload_adapter(name))
        gc.collect()
        assert sum(locked.num_free.values()) == total


def test_it_is_half_of_the_host_memory_where_a_device_is_faster_by_it():
    def device(platform, *kinds):
        memories = [SimpleNamespace(kind=kind) for kind in kinds]
        return SimpleNamespace(platform=platform, addressable_memories=lambda: memories)

    gpu = device("gpu", "device", "pinned_host")
    assert locked_bytes(2000, gpu) == 1000
    assert locked_bytes(np.inf, gpu) == 2 << 30
    assert locked_bytes(2000, device("gpu", "device")) == 0
    assert locked_bytes(2000, jax.devices("cpu")[0]) == 0
    assert pj.EngineConfig().host_adapter_memory is None
