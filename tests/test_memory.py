"""Bytes reckoned before they are taken: they are what is taken, or refused."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import pytest
from flax import nnx

import punica_jax as pj
from punica_jax.batch import Batch, Bucket, Buckets
from punica_jax.memory import (
    DeviceMemory,
    MemoryPlan,
    bytes_text,
    default_device,
    default_dtype,
)
from punica_jax.models import MODULE_GROUPS, KvCache, Llama, LoraPools, read_adapter
from punica_jax.sizes import Sizes
from punica_jax.step import run_step
from punica_jax.workspace import workspace_bytes
from tests.engine_cases import files, make_engine
from tests.tiny_checkpoint import CONFIG

SIZES = Sizes(max_model_len=100, max_seats=4, num_slots=3, max_rank=20, page_size=16)
UNKNOWN = DeviceMemory("tpu (v9)", None)
# 2 layers, keys and values, 2 heads of 8, 16 tokens, float32.
KV_PAGE = 2 * 2 * 2 * 8 * 16 * 4


def plan(device=UNKNOWN, sizes=SIZES, dtype="float32", **limits):
    return MemoryPlan.of(CONFIG, sizes, dtype, device, **limits)


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with make_engine(files(tmp_path_factory), warm_up=False) as engine:
        yield engine


@pytest.mark.parametrize(("served_by", "num_staged"), [("llm", 1), ("engine", 3)])
def test_the_plan_is_what_is_taken(served_by, num_staged, checkpoint, request):
    served = request.getfixturevalue(served_by)
    runner, plan = served._runner, served._base.plan
    assert plan.weight_bytes == nbytes(runner._weights)
    assert plan.kv_bytes == nbytes(runner._cache)
    assert plan.adapter_bytes == nbytes(runner.adapters.pools)
    assert plan.seat_bytes == nbytes((runner._seats, runner._counts))
    assert plan.num_params == sum(leaf.size for leaf in runner._weights)
    largest = read_adapter(checkpoint / "c", CONFIG, dtype="float32")
    assert largest.rank == plan.sizes.max_rank
    pages = {group: range(largest.num_pages(group)) for group in MODULE_GROUPS}
    staged = runner.adapters.stage(largest, 0, pages)
    assert plan.staging_bytes == num_staged * nbytes(staged.pages)


def test_what_decode_steps_write_to_is_in_the_plan(checkpoint):
    sizes = {"max_seats": 70, "page_size": 16, "progress": False}
    llm = pj.LLM(checkpoint / "model", **sizes)
    spent, plan = llm._runner._spent, llm._base.plan
    buckets = Buckets(plan.sizes.max_seats, plan.sizes.max_rows)
    assert len(list(buckets)) > 4
    assert plan.result_bytes == nbytes([spent.of(bucket) for bucket in buckets])
    assert plan.result_bytes < plan.total_bytes


def test_the_plan_is_in_the_log(tmp_path_factory, caplog):
    with caplog.at_level("INFO", "punica_jax"):
        engine = make_engine(files(tmp_path_factory), warm_up=False)
    engine.close()
    plan = engine._base.plan
    lines = {line.split()[0]: line for line in caplog.text.splitlines() if line}
    for subject, num_bytes in {
        "model": plan.weight_bytes,
        "KV": plan.kv_bytes,
        "adapters": plan.adapter_bytes,
        "device": plan.total_bytes,
    }.items():
        assert bytes_text(num_bytes) in lines[subject]
    assert lines["workspace"] == (
        f"  workspace {bytes_text(plan.workspace_bytes)} at most for a step, "
        f"{bytes_text(plan.staging_bytes)} for adapters on their way, "
        f"{bytes_text(plan.seat_bytes)} for the seats' sampling"
    )


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
    device = DeviceMemory("gpu (X)", 10**8)
    for limit in (10 * KV_PAGE, 10 * KV_PAGE + KV_PAGE - 1, 10 * KV_PAGE / 1e8):
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


def test_what_is_left_goes_to_adapters_and_cache():
    wanted = plan()
    exact = plan(DeviceMemory("gpu (X)", wanted.total_bytes + 10, 10))
    assert exact.kv_bytes == wanted.kv_bytes
    # What the cache leaves is the adapters'.
    less = plan(DeviceMemory("gpu (X)", wanted.total_bytes - 1))
    assert less.kv_bytes == wanted.kv_bytes
    assert less.sizes.num_rank_pages == wanted.sizes.num_rank_pages - 1
    # At least a half of the room is theirs.
    room = 200_000
    total = wanted.total_bytes - wanted.kv_bytes - wanted.adapter_bytes + room
    few = plan(DeviceMemory("gpu (X)", total))
    assert SIZES.pages_per_adapter <= few.sizes.num_rank_pages < SIZES.num_rank_pages
    assert SIZES.pages_per_seq <= few.sizes.num_kv_pages < SIZES.num_kv_pages
    assert total - KV_PAGE < few.total_bytes <= total
    # A limit that is given is kept, and the other gets the rest.
    device = DeviceMemory("gpu (X)", wanted.total_bytes - 20 * KV_PAGE)
    given = plan(device, kv_memory=8 * KV_PAGE)
    assert given.kv_bytes == 8 * KV_PAGE
    assert given.adapter_bytes == wanted.adapter_bytes
    given = plan(device, adapter_memory=wanted.adapter_bytes)
    assert given.kv_bytes == 8 * KV_PAGE


def test_more_than_the_device_has():
    smallest = dataclasses.replace(SIZES, max_kv_pages=7, max_rank_pages=2)
    least = plan(sizes=smallest).total_bytes
    plan(DeviceMemory("gpu (X)", least + 10, 10))
    with pytest.raises(ValueError) as caught:
        plan(DeviceMemory("gpu (X)", least + 9, 10))
    lines = str(caught.value).splitlines()
    assert lines[0] == "the model does not fit into the device's memory:"
    assert [line.split(maxsplit=2)[2] for line in lines[1:-1]] == [
        "weights",
        "KV cache: 7 pages of 16 tokens (7 for one sequence of max_model_len = 100)",
        "adapters: 2 rank pages (2 for one of max_rank = 20)",
        "adapters on their way there",
        "what seats keep for sampling",
        "what a step takes at most",
        "in use already",
        "together",
        "that gpu (X) has",
    ]
    assert lines[2].startswith("   28.00 KiB  KV cache")
    assert lines[-1].startswith("Lower max_model_len, max_seats or kv_memory")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changed",
    [{}, {"intermediate_size": 3072}, {"num_kv_heads": 8}, {"vocab_size": 2**16}],
)
def test_a_step_takes_no_more_than_its_bound(changed, dtype):
    config = pj.LlamaConfig(
        **{
            "vocab_size": 4096,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_layers": 2,
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 64,
            **changed,
        }
    )
    sizes = Sizes(
        max_model_len=2048, max_seats=32, num_slots=32, max_rank=64, page_size=64
    )
    model = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    cache = jax.eval_shape(
        lambda: KvCache.zeros(config, sizes.num_kv_pages, sizes.page_size, dtype)
    )
    pools = jax.eval_shape(
        lambda: LoraPools.zeros(
            config,
            num_slots=sizes.num_slots,
            num_pages=sizes.num_rank_pages,
            max_rank=sizes.max_rank,
            dtype=dtype,
        )
    )
    bound = workspace_bytes(config, sizes, dtype, "xla")
    for bucket in (Bucket(sizes.max_rows, 32, sizes.max_rows), Bucket(32, 32, 1)):
        batch = Batch.of([], bucket, sizes.pages_per_seq)
        step = jax.jit(
            functools.partial(run_step, implementation="xla"), donate_argnums=1
        )
        compiled = step.lower(model, cache, pools, batch).compile()
        memory = compiled.memory_analysis()
        taken = memory.temp_size_in_bytes
        # Its results, but for the cache, which was there.
        taken += memory.output_size_in_bytes - memory.alias_size_in_bytes
        assert taken <= bound, (bucket.name, taken, bound)
    assert bound < 8 * taken


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
