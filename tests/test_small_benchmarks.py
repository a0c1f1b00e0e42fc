"""Every benchmark's command in a small form, so that none of them rots."""

import json

import numpy as np
import pytest

from benchmarks import (
    adapters,
    attention,
    ceilings,
    cluster,
    device_time,
    dispatch,
    order,
    products,
    provenance,
    sgmv,
    where,
)
from benchmarks.decode import SHAPES
from benchmarks.sgmv_cells import Cell, load_cells
from punica_jax.pallas_kernels.shapes import MODEL_SHAPES
from tests.benchmark_cases import TINY


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a benchmark's `main` on a few words; returns its records."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(device_time, "_WINDOW_S", 1e-4)
    monkeypatch.setattr(adapters, "_NUM_PAGES", 8)
    monkeypatch.setattr(device_time, "COLD_BYTES", 1)

    def call(module, words=""):
        out = tmp_path / "records.jsonl"
        module.main([*words.split(), "--out", str(out), "--commit", "abc"])
        records = [json.loads(line) for line in out.read_text().splitlines()]
        assert all(set(provenance.FIELDS) <= set(record) for record in records)
        assert {record["commit"] for record in records} == {"abc"}
        return records

    return call


def test_orders_are_of_the_same_rows():
    sizes = [1, 3, 2]
    arranged = {name: list(order.arrange(sizes, name)) for name in order.ORDERS}
    assert arranged["sorted"] == [0, 1, 1, 1, 2, 2]
    assert arranged["interleaved"] == [0, 1, 2, 1, 2, 1]
    assert sorted(arranged["shuffled"]) == arranged["sorted"]


def test_rows_spread_evenly_over_the_adapters():
    rng = np.random.default_rng(0)
    few = adapters.draw(3, 8, rng)
    assert sorted(np.bincount(few)) == [2, 3, 3]
    many = adapters.draw(1000, 8, rng)
    assert len(set(many)) == 8 and max(many) < 1000


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("segments", marks=pytest.mark.slow),
        pytest.param("per_row", marks=pytest.mark.slow),
        "gather",
    ],
)
def test_products_are_checked(method, monkeypatch):
    monkeypatch.setattr(device_time, "_WINDOW_S", 1e-4)
    monkeypatch.setattr(device_time, "COLD_BYTES", 1)
    product = products.Product.random(num_pages=4, width=32, rows=3)
    names = np.asarray([1, 0, 1])
    record = product.time(names, method)
    assert record["in_batch"] == 2 and record["us"] >= record["launch_us"] > 0
    # A and B of two adapters of rank 16, bfloat16.
    assert record["bytes"] == 2 * (2 * 16 * 64)
    assert record["flops"] == 2 * 3 * 16 * 64
    monkeypatch.setattr(products, "_MAX_ERROR", 1e-6)
    with pytest.raises(SystemExit, match=f"{method}: relative error"):
        product.time(names, method)


@pytest.mark.parametrize("num_adapters", [1, 2, 8, 64])
def test_products_read_more_than_a_cache_holds(num_adapters):
    product = products.Product(
        a=np.broadcast_to(np.float16(0), (1024, 1, 16, 4096)),
        b=np.broadcast_to(np.float16(0), (1024, 16, 4096)),
        x=np.zeros((64, 4096), np.float16),
    )
    draws = product._draws(num_adapters)
    assert all(len(set(pages)) == num_adapters for pages in draws.tolist())
    # The bytes between two reads of a page; the L2 of an H200 has 60 MB.
    distinct = len(np.unique(draws)) / num_adapters
    assert distinct * product.num_bytes(num_adapters) > 100e6


def test_commit(tmp_path):
    assert provenance.commit_of(tmp_path) == "unknown"


def test_ceilings(run):
    (record,) = run(ceilings, "--size-mb 1 --width 64")
    assert record["bytes_per_s"] > 0 and record["flops_per_s"] > 0


@pytest.mark.slow
def test_sgmv(run, monkeypatch):
    cell = Cell(suite="s", d_in=32, d_outs=(16,), rank=16, rows=3, popularity="uniform")
    monkeypatch.setattr(sgmv, "load_cells", lambda: [cell])
    monkeypatch.setattr(sgmv, "METADATA_ROWS", (8,))
    monkeypatch.setattr(device_time, "COLD_BYTES", cell.num_bytes)
    record, metadata = run(sgmv)
    assert record["adapters"] == 2 and record["flops"] == cell.num_flops
    assert all(record[f"{method}_us"] > 0 for method in sgmv.METHODS)
    assert metadata["cell"] == "segment_metadata 8"
    # 8 slots in; 8 rows, 8 slots and 3 x 8 of tiles out.
    assert metadata["bytes"] == 4 * 6 * 8
    for method in ("ours", "xla"):
        over = metadata[f"{method}_us"] / metadata["floor_us"]
        assert metadata[f"{method}_x_floor"] == pytest.approx(over)


@pytest.mark.parametrize("cell", load_cells(), ids=lambda cell: cell.name)
def test_launches_read_more_than_a_cache_holds(cell):
    assert device_time.num_sets(cell.num_bytes) * cell.num_bytes > 100e6


@pytest.mark.slow
def test_order(run):
    words = "--width 32 --rows 4 --pages 8 --popularity uniform"
    records = run(order, words)
    assert len(records) == len(order.ORDERS) * len(products.METHODS)
    assert {record["in_batch"] for record in records} == {2}


@pytest.mark.slow
def test_adapters(run):
    words = "--shape tiny --counts 1 5 --rows 3 --width 32 --steps 2 --repeats 2"
    records = run(adapters, words)
    steps = [r for r in records if r["benchmark"] == "adapters_step"]
    assert [(r["adapters"], r["in_batch"]) for r in steps] == [(0, 0), (1, 1), (5, 3)]
    assert len({r["backbone_ms"] for r in steps}) == 1
    products_of = [r["adapters"] for r in records if r not in steps]
    assert products_of == [1, 1]  # five do not fit three rows


@pytest.mark.slow
@pytest.mark.parametrize("query_len", [1, 20])
def test_where(run, query_len):
    words = "--shape tiny --rows 3 --context 64 --steps 2 --kernels 3"
    records = run(where, f"{words} --query-len {query_len}")
    assert {record["query_len"] for record in records} == {query_len}
    for popularity, method in (("none", "backbone"), ("distinct", "ours")):
        own = [r for r in records if r["popularity"] == popularity]
        assert {r["method"] for r in own} == {method}
        us = {r["group"]: r["us"] for r in own}
        assert tuple(us) == where.GROUPS
        assert us["base products"] > 0 and us["attention"] > 0
        assert (us["shrink"] > 0) == (us["expand"] > 0) == (method == "ours")


def test_a_chunk_is_no_longer_than_its_sequence(run, capsys):
    with pytest.raises(SystemExit):
        run(where, "--shape tiny --context 64 --query-len 65")
    text = "--query-len must be 1 to --context = 64, got 65"
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_dispatch(run):
    (record,) = run(dispatch, "--rows 2 --layers 1 --repeats 2")
    assert 0 < record["launch_ms"] <= record["step_ms"]


def test_attention_has_the_heads_of_the_named_shapes():
    heads = {name: (s.num_heads, s.num_kv_heads) for name, s in MODEL_SHAPES.items()}
    names = [case.name for case in attention.CASES]
    assert len(set(names)) == len(names) and "8b-32x1-512" in names
    for case in attention.CASES:
        assert (case.heads, case.kv_heads) == heads[case.name[:2].upper()]
    assert {case.name[:2].upper() for case in attention.CASES} == heads.keys()


@pytest.mark.parametrize("case", attention.CASES, ids=lambda case: case.name)
def test_attention_reads_more_than_an_l2_before_it_reads_again(case):
    assert (case.num_sets - 1) * case.num_bytes > 60e6


@pytest.fixture
def tiny_attention(monkeypatch):
    """Make a small case the only one."""

    def make(**sizes):
        shape = {"heads": 2, "kv_heads": 2, "head_dim": 16, "page_size": 16}
        case = attention.Case(name="tiny", kv_len=32, **shape, **sizes)
        monkeypatch.setattr(attention, "CASES", [case])
        monkeypatch.setattr(attention, "COLD_BYTES", 1)
        return case

    return make


@pytest.mark.slow
@pytest.mark.parametrize("query_len", [1, 32])
def test_attention(run, tiny_attention, query_len):
    case = tiny_attention(seqs=2, query_len=query_len)
    (record,) = run(attention, "tiny")
    assert record["us"] > 0 and record["bytes"] == case.num_bytes


@pytest.mark.slow
def test_attention_beside_a_prompt(run, tiny_attention):
    case = tiny_attention(seqs=3, query_len=1, prompt_len=6)
    assert case.rows == 1 + 1 + 6
    # Two rows see 32 tokens each, the prompt's 1 to 6.
    assert case.num_flops == 2 * 2 * (32 + 32 + 21) * case.head_dim * case.heads
    (record,) = run(attention, "tiny")
    assert record["us"] > 0 and record["prompt_len"] == 6
    assert record["config"] == "as chosen"


@pytest.mark.slow
def test_cluster(run):
    records = run(cluster, "--shape tiny --seats 2 --new 40 --step-rows 8")
    one, two, move = records
    assert (one["benchmark"], one["engines"]) == ("cluster_scaling", 1)
    assert two["engines"] == 2 and min(one["tokens_per_s"], two["step_ms"]) > 0
    assert (move["benchmark"], move["requests"]) == ("cluster_move", 2)
    assert move["slowest_ms"] >= move["median_ms"] > 0 and move["usual_ms"] > 0


def test_a_cluster_has_several_engines(run, capsys):
    with pytest.raises(SystemExit):
        run(cluster, "--devices 1")
    assert "--devices must be at least 2, got 1" in capsys.readouterr().err
