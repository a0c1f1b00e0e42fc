"""Bytes reckoned before they are taken: they are what is taken, or refused."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

import punica_jax as pj
from punica_jax.memory import (
    DeviceMemory,
    MemoryPlan,
    bytes_text,
    default_device,
    default_dtype,
)
from punica_jax.sizes import Sizes
from tests.tiny_checkpoint import CONFIG

SIZES = Sizes(max_model_len=100, max_seats=4, num_slots=3, max_rank=20, page_size=16)
UNKNOWN = DeviceMemory("tpu (v9)", None)
# 2 layers, keys and values, 2 heads of 8, 16 tokens, float32.
KV_PAGE = 2 * 2 * 2 * 8 * 16 * 4


def plan(device=UNKNOWN, sizes=SIZES, dtype="float32", **limits):
    return MemoryPlan.of(CONFIG, sizes, dtype, device, **limits)


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_the_plan_is_what_is_taken(llm):
    runner = llm._runner
    assert llm._plan.weight_bytes == nbytes(runner._weights)
    assert llm._plan.kv_bytes == nbytes(runner._cache)
    assert llm._plan.adapter_bytes == nbytes(runner.pools)
    assert llm._plan.seat_bytes == nbytes((runner._seats, runner._counts))
    assert llm._plan.num_params == sum(leaf.size for leaf in runner._weights)


def test_half_as_much_in_half_precision():
    full, half = plan(), plan(dtype="bfloat16")
    assert half.num_params == full.num_params
    assert half.weight_bytes * 2 == full.weight_bytes
    assert half.kv_bytes * 2 == full.kv_bytes == 4 * 7 * KV_PAGE
    assert full.adapter_bytes / 2 < half.adapter_bytes < full.adapter_bytes  # tables


@pytest.mark.parametrize("size", ["max_kv_pages", "max_rank_pages"])
def test_limits_of_pages(size):
    assert (SIZES.num_kv_pages, SIZES.num_rank_pages) == (28, 8)
    limited = dataclasses.replace(SIZES, **{size: 7})
    assert min(limited.num_kv_pages, limited.num_rank_pages) == 7
    assert dataclasses.replace(SIZES, **{size: 99}).num_kv_pages == 28
    with pytest.raises(ValueError, match=f"{size} must be an integer of at least 1"):
        dataclasses.replace(SIZES, **{size: 0})


def test_bytes_and_fractions():
    device = DeviceMemory("gpu (X)", 1_000_000)
    for limit in (10 * KV_PAGE, 10 * KV_PAGE + KV_PAGE - 1, 10 * KV_PAGE / 1e6):
        limited = plan(device, kv_memory=limit)
        assert limited.sizes.num_kv_pages == 10
        assert limited.kv_bytes == 10 * KV_PAGE
    assert plan(kv_memory=10**12).kv_bytes == plan().kv_bytes  # as much as seats use
    few = plan(adapter_memory=plan().adapter_bytes - 1)
    assert few.sizes.num_rank_pages == SIZES.num_rank_pages - 1
    assert few.adapter_bytes < plan().adapter_bytes
    assert plan(adapter_memory=few.adapter_bytes) == few
    assert plan(adapter_memory=1 << 40).sizes.num_rank_pages == SIZES.num_rank_pages


@pytest.mark.parametrize("name", ["kv_memory", "adapter_memory"])
@pytest.mark.parametrize("value", [0, -1, 0.0, 1.5, -0.5, True, "1GB", float("nan")])
def test_limits_that_are_none(name, value):
    with pytest.raises(ValueError) as caught:
        plan(DeviceMemory("cpu", 10**9), **{name: value})
    assert str(caught.value) == (
        f"{name} must be bytes (an integer above 0), a fraction of the device's memory "
        f"(a float above 0, at most 1.0) or None, got {value!r}"
    )


def test_a_fraction_of_the_unknown():
    with pytest.raises(ValueError) as caught:
        plan(kv_memory=0.5)
    assert str(caught.value) == (
        "kv_memory must be bytes here: how much memory tpu (v9) has is not known, got "
        "the fraction 0.5"
    )


def test_too_little():
    with pytest.raises(ValueError) as caught:
        plan(kv_memory=7 * KV_PAGE - 1)
    assert str(caught.value) == (
        "kv_memory = 28671 is 24.00 KiB in whole pages, and one sequence of "
        "max_model_len = 100 tokens needs 28.00 KiB; raise kv_memory or lower "
        "max_model_len"
    )
    assert plan(kv_memory=7 * KV_PAGE).sizes.num_kv_pages == 7
    with pytest.raises(ValueError, match=r"adapter_memory = 1 is 1 bytes, and one ad"):
        plan(adapter_memory=1)
    most = plan(sizes=dataclasses.replace(SIZES, max_rank_pages=2)).adapter_bytes
    assert plan(adapter_memory=most).sizes.num_rank_pages == 2
    with pytest.raises(
        ValueError, match="one adapter of max_rank = 20 needs"
    ) as caught:
        plan(adapter_memory=most - 1)
    assert str(caught.value).endswith("; raise adapter_memory or lower max_rank")


@pytest.mark.parametrize("dtype", ["int8", "float64", "nonsense", 3])
def test_no_such_weights(dtype):
    with pytest.raises(ValueError) as caught:
        plan(dtype=dtype)
    assert str(caught.value) == (
        f"dtype must be one of ('float32', 'bfloat16', 'float16'), got {dtype!r}"
    )


def test_more_than_the_device_has():
    needed = plan().total_bytes
    plan(DeviceMemory("gpu (X)", needed + 10, 10))
    with pytest.raises(ValueError) as caught:
        plan(DeviceMemory("gpu (X)", needed + 9, 10))
    lines = str(caught.value).splitlines()
    assert lines[0] == "the model does not fit into the device's memory:"
    assert [line.split(maxsplit=2)[2] for line in lines[1:-1]] == [
        "weights",
        "KV cache: 28 pages of 16 tokens, for max_seats = 4 of max_model_len = 100",
        "adapters: 8 rank pages, for num_slots = 3 and one more of max_rank = 20",
        "what seats keep for sampling",
        "in use already",
        "together",
        "that gpu (X) has",
    ]
    assert lines[2].startswith("     112 KiB  KV cache")
    assert lines[-1].startswith("Lower max_seats, max_model_len or kv_memory")


def test_refused_before_weights_are_read(checkpoint, tmp_path, monkeypatch):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((checkpoint / "model" / name).read_bytes())
    with pytest.raises(ValueError, match="kv_memory = 5 is 0 bytes in whole pages"):
        pj.LLM(tmp_path, kv_memory=5)
    small = DeviceMemory("cpu", 1000)
    monkeypatch.setattr(DeviceMemory, "of", lambda device: small)
    with pytest.raises(ValueError, match="does not fit into the device's memory"):
        pj.LLM(tmp_path)


@pytest.mark.parametrize(
    ("platform", "capability", "dtype"),
    [
        ("cpu", None, "float32"),
        ("tpu", None, "bfloat16"),
        ("gpu", "7.5", "float16"),
        ("gpu", "6.0", "float16"),
        ("gpu", "8.0", "bfloat16"),
        ("gpu", "9.0", "bfloat16"),
        ("gpu", "10.0", "bfloat16"),
        ("gpu", "gfx942", "bfloat16"),
    ],
)
def test_default_dtype(platform, capability, dtype):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    if capability is None:
        del device.compute_capability
    assert default_dtype(device) == dtype


def test_devices():
    def device(platform, stats):
        return SimpleNamespace(
            platform=platform, device_kind="X", memory_stats=lambda: stats
        )

    stats = {"bytes_limit": 100, "bytes_in_use": 7}
    assert DeviceMemory.of(device("gpu", stats)) == DeviceMemory("gpu (X)", 100, 7)
    assert DeviceMemory.of(device("tpu", None)) == DeviceMemory("tpu (X)", None)
    here = DeviceMemory.of(default_device())
    assert here.name == "cpu" and here.total_bytes is not None
    assert 2**28 < here.total_bytes < 2**50
    with jax.default_device(jax.devices()[1]):
        assert default_device() == jax.devices()[1]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (120 * 1024, "120 KiB"),
        (5 * 2**20 // 2, "2.50 MiB"),
        (3 * 2**30, "3.00 GiB"),
        (2**41, "2048 GiB"),
    ],
)
def test_bytes_text(number, text):
    assert bytes_text(number) == text
