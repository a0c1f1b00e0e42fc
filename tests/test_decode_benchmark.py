"""The decode benchmark: its rivals are right, and so are its sums."""

import json
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import decode, decode_goals, peers
from benchmarks.decode import Case
from benchmarks.decode_rivals import LAUNCHES
from punica_jax import bench_model
from punica_jax.batch import Batch, Buckets
from punica_jax.bench_model import make_config, num_rank_pages, set_ranks
from tests.benchmark_cases import TINY, make_tiny_bench

ROWS = 3


@pytest.fixture(scope="module")
def bench():
    return make_tiny_bench(rows=ROWS)


def test_popularities_give_every_row_an_adapter():
    case = Case(rows=32, contexts=(512,), popularity="uniform", ranks=(8, 16, 64))
    assert case.sizes == [6, 6, 5, 5, 5, 5]
    assert case.adapter_ranks == [8, 16, 64, 8, 16, 64]
    assert sorted(case.slots) == sorted(np.repeat(range(6), case.sizes))
    assert list(Case(rows=2, contexts=(512,)).slots) == [-1, -1]


def test_contexts():
    assert decode.parse_contexts("512") == (512,)
    span = decode.parse_contexts(peers.SPAN)
    assert (span[0], span[-1], np.mean(span)) == (512, 640, 576)
    assert Case(rows=1, contexts=span).context_label == peers.SPAN
    assert Case(rows=1, contexts=(512,)).context_label == 512


def test_group_and_swap_is_a_batch_an_adapter_largest_first(bench):
    case = Case(rows=ROWS, contexts=(50, 54), popularity="skewed")
    assert case.sizes == [1, 1, 1]
    case = Case(rows=ROWS, contexts=(50, 54), popularity="one-vs-rest")
    batches = decode.batches_of(bench, case, "group_swap")
    assert [list(batch.slots) for batch in batches] == [[1, 1], [0]] * 2
    pages = [batch.seqs.page_table for batch in batches[:2]]
    assert len(set(np.concatenate([p.ravel() for p in pages]))) == ROWS
    assert [batch.seqs.kv_lens[0] for batch in batches] == [50, 50, 54, 54]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("ours", marks=pytest.mark.slow),
        pytest.param("gather", marks=pytest.mark.slow),
        pytest.param("ragged_dot", marks=pytest.mark.slow),
        pytest.param("loop", marks=pytest.mark.slow),
    ],
)
def test_methods_compute_the_same_step(bench, method):
    case = Case(rows=ROWS, contexts=(50,), popularity="distinct")
    logits = decode.Logits(bench)
    assert logits.difference(case, method) < 0.05
    if method in LAUNCHES:
        # Every row with another one's adapter is far off.
        swapped = decode.adapters_of(bench, case, method)
        swapped = swapped.for_rows(np.roll(case.slots, 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ADAPTERS, method, swapped)
            patch.setattr(decode, "adapters_of", lambda _, case, name: ADAPTERS[name])
            patch.setitem(ADAPTERS, "ours", bench.pools)
            assert logits.difference(case, method) > decode._MAX_LOGITS_OFF


ADAPTERS = {}


@pytest.mark.slow
def test_records_say_what_a_step_costs(bench):
    cases = [Case(rows=ROWS, contexts=(48, 52), popularity="identical")]
    bare, ours = decode.run_cases(
        bench, "tiny", cases, ["ours"], num_steps=2, repeats=2
    )
    assert (bare["method"], bare["popularity"]) == ("backbone", "none")
    assert (ours["method"], ours["popularity"]) == ("ours", "identical")
    assert ours["backbone_ms"] == bare["step_ms"] > 0
    assert ours["context"] == "48..52"
    for record in (bare, ours):
        assert record["low_ms"] <= record["step_ms"] <= record["high_ms"]
        per_s = ROWS / record["step_ms"] * 1e3
        assert record["tokens_per_s"] == pytest.approx(per_s)
        times = record["step_ms"] / record["floor_ms"]
        assert record["x_floor"] == pytest.approx(times)


def test_floor_is_every_byte_once(bench):
    leaves = jax.tree.leaves(bench.runner._weights)
    weights = sum(leaf.nbytes for leaf in leaves) - 2 * 64 * 32  # but the embedding
    keys_and_values = 2 * ROWS * 50 * 2 * 32
    assert bench.backbone_bytes(ROWS, 50) == weights + keys_and_values
    # A and B of q, k, v, o (32 wide each), gate, up and down (48).
    per_rank = 4 * (32 + 32) + 3 * (32 + 48)
    assert bench.adapter_bytes([8, 16]) == 2 * 24 * per_rank


def record(**fields):
    common = {"shape": "7B", "rows": 32, "context": 512, "method": "ours"}
    return {**common, "adapters_ms": 0.6, "pages_ms": 0.6, **fields}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--contexts 640..512", "must be N or N..M, N from 1, got '640..512'"),
        ("--contexts 0", "must be N or N..M, N from 1, got '0'"),
        ("--rows 0", "must be an integer from 1, got '0'"),
        ("--repeats x", "must be an integer from 1, got 'x'"),
        ("--ranks 8,x", "must be N or N,N,... from 1, got '8,x'"),
    ],
)
def test_words_that_say_nothing(words, message, capsys):
    with pytest.raises(SystemExit):
        decode.main(words.split())
    assert message in capsys.readouterr().err


def test_goals():
    bare = record(step_ms=6.5)
    assert decode_goals.judge(record(step_ms=7.29), bare)["met"] is True
    judged = decode_goals.judge(record(step_ms=7.31), bare)
    assert judged["met"] is False
    assert judged["allowed_ms"] == pytest.approx(7.3)
    assert "met" not in decode_goals.judge(record(method="gather", step_ms=7), bare)
    assert "met" not in decode_goals.judge(record(rows=5, step_ms=7), bare)
    span = decode_goals.judge(record(context=peers.SPAN, step_ms=7.0), bare)
    assert span["vllm_none_ms"] == 7.26
    least = record(step_ms=7.0, pages_ms=0.3)
    mixed = decode_goals.judge_ranks(record(step_ms=7.5, pages_ms=0.7), least)
    assert mixed["rank_allowed_ms"] == pytest.approx(7.54) and mixed["rank_met"]


def test_goals_of_products():
    cell = {"ours_us": 7.0, "peer_us": 10.0, "peer_loop_us": 50.0, "gather_us": 8.0}
    loop = {"ours_us": 8.3, "peer_us": 12.0, "peer_loop_us": 8.0, "gather_us": 9.0}
    both = {"in_turn": True, "adapters": 1, "ragged_dot_us": 9.0}
    cell, loop = (one | both for one in (cell, loop))

    def judged(*cells):
        goals = decode_goals.goals([], cells)
        return {goal.what.split(", ")[1]: (goal.measured, goal.met) for goal in goals}

    faster, mean = "faster than the best existing kernel", "over the best existing"
    assert judged(cell, loop) == {
        faster: ("1 of 1", True),
        "where PyTorch's loop over adapters beats every kernel": ("1 of 1", True),
        f"{mean} kernel's": ("0.70", True),
        "faster than XLA gather": ("2 of 2", True),
        "faster than `ragged_dot`": ("2 of 2", True),
    }
    slow = judged(cell, loop | {"ours_us": 8.5})
    assert slow["where PyTorch's loop over adapters beats every kernel"][1] is False
    assert judged(cell | {"ours_us": 7.6})[f"{mean} kernel's"] == ("0.76", False)
    # Where ours failed it is not faster.
    failed = {name: us for name, us in cell.items() if name != "ours_us"}
    assert judged(cell, failed)[faster] == ("1 of 2", False)
    assert judged(cell, failed)[f"{mean} kernel's"] == ("inf", False)
    # What is the host's time says nothing, unless it is shorter than ours.
    host = judged(cell, cell | {"gather_us": 9.0, "gather_launch_us": 8.9})
    assert host["faster than XLA gather"] == ("1 of 1, 1 not measured", False)
    host = judged(cell, cell | {"gather_us": 1.0, "gather_launch_us": 0.95})
    assert host["faster than XLA gather"] == ("1 of 2", False)
    # Nor does one whose calls did not wait for one another.
    at_once = cell | {"in_turn": False, "loop_us": 5.0}
    assert judged(at_once)["faster than XLA gather"] == (
        "not measured",
        False,
    )
    assert decode_goals.device_us(at_once, "loop") is None
    assert decode_goals.device_us(at_once | {"adapters": 2}, "loop") == 5.0
    assert judged({"xla_us": 1.0, "ours_us": 2.0}) == {}


def test_goals_of_steps_that_were_not_measured_say_so():
    step = record(popularity="identical", step_ms=6.41, allowed_ms=6.22, met=False)
    assert decode_goals.goals([], []) == []
    goals = decode_goals.goals([step], [])
    assert [goal.measured for goal in goals].count("not measured") == len(goals) - 2
    now, first = [goal for goal in goals if goal.records]
    case = "7B, 32 rows, context 512, identical: a step, against"
    assert now.what.startswith(f"{case} one without adapters") and not now.met
    # A backbone that got faster since makes no step slower.
    assert first.what.startswith(f"{case} 6.50 ms without adapters") and first.met
    assert [goal for goal in goals if goal.met] == [first]
    assert (now.wanted, now.measured) == ("<= 6.22 ms", "6.41 ms")
    asked = {goal.what.partition(":")[0] for goal in goals}
    assert {
        "8B, 32 rows, contexts 512 to 640",
        "7B, 1 row, context 512",
        "7B, 128 rows, context 512, skewed",
    } <= asked


@pytest.mark.parametrize(("launch_ms", "met"), [(1.0, True), (1.01, False)])
def test_a_launch_may_take_a_millisecond(launch_ms, met):
    judged = decode_goals.judge_launch({"launch_ms": launch_ms})
    assert (judged["goal"], judged["met"]) == ("1 ms", met)


def test_ranks_take_the_pages_that_they_need(bench):
    assert [num_rank_pages(rank) for rank in (8, 16, 24, 64)] == [1, 1, 2, 4]
    pools = set_ranks(bench.pools, [8, 24])
    counts = pools.layer(0).qkv.layer_num_pages
    assert counts.tolist() == [[1] * 3, [2] * 3, [0] * 3]
    assert pools.down.page_table[:2, :2].tolist() == [[0, -1], [1, 2]]
    case = Case(rows=2, contexts=(50,), popularity="distinct", ranks=(8, 24))
    per_rank = bench.adapter_bytes([1]) / 4.3e12 * 1e3
    assert decode.pages_ms(bench, case) == pytest.approx(48 * per_rank)
    with pytest.raises(AssertionError):
        set_ranks(bench.pools, [64, 64])


def test_adapter_bytes_are_those_of_a_7b_model():
    config = make_config(decode.SHAPES["7B"])
    bench = object.__new__(decode.BenchModel)
    bench.config, bench.dtype = config, np.dtype("float16")
    # 40 M parameters at rank 16.
    assert bench.adapter_bytes([16]) == 2 * 39_976_960


class SlowToStart:
    """A device of 10 ms a step; launches take 1 ms, the first after a wait 30.

    When 14 steps are on their way, a launch waits for the first of them.
    """

    def __init__(self, now_s=0.0):
        self.now_s = self.ends_s = now_s
        self.has_waited = True
        self._on_their_way = []
        self.adapters = SimpleNamespace(pools=None)

    def forward(self, batch):
        self.now_s += 0.030 if self.has_waited else 0.001
        if len(self._on_their_way) == 14:
            self.now_s = max(self.now_s, self._on_their_way.pop(0))
        self.ends_s = max(self.ends_s, self.now_s) + 0.010
        self._on_their_way.append(self.ends_s)
        self.has_waited = False
        wait = partial(self._wait, self.ends_s)
        return SimpleNamespace(likely=SimpleNamespace(block_until_ready=wait))

    def step(self, batch):
        self.forward(batch).likely.block_until_ready()

    def _wait(self, ends_s):
        self.now_s = max(self.now_s, ends_s)
        self.has_waited = self.now_s >= self.ends_s


def test_a_first_step_is_launched_before_the_clock_starts(monkeypatch):
    bench = object.__new__(decode.BenchModel)
    device = bench.runner = SlowToStart()
    monkeypatch.setattr(bench_model.time, "perf_counter", lambda: device.now_s)
    batches = [SimpleNamespace(bucket=0), SimpleNamespace(bucket=1)]
    times = bench.time(batches, None, num_steps=40, repeats=3)
    assert times.low_s == pytest.approx(0.020) and times.high_s == times.low_s
    assert times.launch_s == pytest.approx(0.002)
    assert times.median_s == times.low_s


@pytest.mark.slow
def test_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(decode.SHAPES, "tiny", TINY)
    out = tmp_path / "new" / "decode.jsonl"
    words = "--shape tiny --rows 1 3 --contexts 40..48 --ranks 8,64 16 --steps 2"
    words += " --repeats 2 --popularity identical distinct"
    words += " --methods ours gather group_swap"
    decode.main([*words.split(), "--commit", "abc", "--out", str(out)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    methods = {"ours", "gather", "group_swap"}
    assert {r["method"] for r in records} == {"backbone", *methods}
    assert {r["commit"] for r in records} == {"abc"}
    # One row has one popularity, and one adapter is no mix of ranks.
    one_row = [r for r in records if r["rows"] == 1]
    assert len(one_row) == 1 + 2 * 3 and len(records) - len(one_row) == 1 + 5 * 3
    # The least of the mixed ranks is there without being asked for.
    mixed = [r for r in records if "rank_met" in r]
    assert [(r["ranks"], r["method"]) for r in mixed] == [([8, 64], "ours")]
    # A rival's launches run beside each other, whatever the rows.
    assert all(r["overlaps"] == (r["method"] == "gather") for r in records)
    for record in records:
        differs_most = record["rows"] == 1 or record["popularity"] == "distinct"
        is_checked = record["method"] in ("ours", "gather") and differs_most
        assert ("logits_off" in record) == is_checked
        assert record.get("logits_off", 0.0) < 0.05
    assert "tiny decode step, 1 layers" in capsys.readouterr().out


def test_a_step_is_compiled_once(compiles):
    """Also the one whose arrays are the first that the model was made with."""
    bench = make_tiny_bench(2)
    buckets = list(Buckets(2, 64))
    assert len(buckets) > 2
    with compiles:
        for _ in bench.runner.compile(buckets, 1):
            pass
        for bucket in buckets * 2:
            bench.runner.step(Batch.of([], bucket, 1))
    assert compiles.count == len(buckets)
