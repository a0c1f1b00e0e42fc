"""The serving benchmark: its workload, its reckoning, and all of it in a small form."""

import collections
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import provenance, serving, serving_model, serving_trace
from benchmarks.decode import SHAPES
from benchmarks.serving_adapters import AllThere, LargestGroup, OneAtATime
from benchmarks.serving_cases import _decode_during
from benchmarks.serving_goals import goals, vllm
from benchmarks.serving_model import Step, floor_s, summary
from benchmarks.serving_trace import Request
from punica_jax import device_pools
from punica_jax.sequence import DEFAULT_TERMS
from tests.benchmark_cases import TINY


def test_lengths_are_those_of_the_paper():
    drawn = np.asarray(serving_trace.lengths(20_000, 2048))
    prompts, outputs = drawn[:, 0], drawn[:, 1]
    assert prompts.min() == 1 and prompts.max() <= 2046 and outputs.min() == 1
    # Log-normal: the median is scale + loc, the mean scale exp(s^2 / 2) + loc.
    assert np.median(prompts) == pytest.approx(17, abs=1)
    assert prompts.mean() == pytest.approx(18 * np.exp(0.32) - 1.5, rel=0.03)
    assert outputs.mean() == pytest.approx(1024 - prompts.mean(), rel=0.03)
    assert (drawn.sum(axis=1) <= 2047).mean() > 0.999
    assert serving_trace.lengths(5, 2048) == serving_trace.lengths(5, 2048)


def test_adapters_are_as_popular_as_their_law_says():
    counts = {
        name: sorted(
            collections.Counter(serving_trace.popular_names(name, 16)).values()
        )
        for name in serving.POPULARITIES
    }
    assert counts["distinct"] == [1] * 16 and counts["identical"] == [16]
    assert counts["uniform"] == [4] * 4
    assert counts["skewed"] == [1, 1, 2, 3, 4, 5]
    assert serving_trace.popular_names(None, 2) == [None, None]
    drawn = collections.Counter(serving_trace.drawn_names("zipf", 20_000, 1000))
    assert drawn["a0"] / drawn["a3"] == pytest.approx(4**1.5, rel=0.1)
    assert max(drawn, key=drawn.__getitem__) == "a0"
    even = collections.Counter(serving_trace.drawn_names("uniform", 20_000, 10))
    assert len(even) == 10 and max(even.values()) < 1.2 * min(even.values())


def test_requests_under_way_are_long_ones_and_anywhere_in_their_output():
    trace = serving_trace.requests_for([None] * 1024, 2048)
    walk = serving_trace.under_way(trace, 1000)
    first = list(itertools.islice(walk, 1000))
    left = np.asarray([request.num_new for request in first])
    whole = np.asarray([request.prompt_len + request.num_new for request in first])
    # Uniform on 0 to m: a long one more likely than a short one has a mean of 2/3 m.
    assert whole.mean() == pytest.approx(2 / 3 * 2048, rel=0.05)
    assert left.mean() == pytest.approx(2048 / 3, rel=0.1) and left.min() >= 1
    then = list(itertools.islice(walk, 30))
    assert [request.number for request in then] == list(range(1000, 1030))
    assert [r.num_new for r in then[:24]] == [r.num_new for r in trace[1000:]]


def test_prompts_begin_differently():
    def request(number):
        return Request(number=number, prompt_len=64, num_new=1, adapter=None)

    assert request(1).prompt(100) == request(1).prompt(100) != request(2).prompt(100)
    assert max(request(3).prompt(7)) < 7


def test_all_there_gives_every_name_a_slot_of_its_own():
    adapters = AllThere(2)
    a, b = adapters.claim("a"), adapters.claim("b")
    assert {a.slot, b.slot} == {0, 1} and a.weights != b.weights
    assert adapters.claim("c") is None and adapters.claim(None).slot == -1
    adapters.release(a)
    c = adapters.claim("c")
    assert c.slot == a.slot and c.weights not in (a.weights, b.weights)
    adapters.release(b)
    again = adapters.claim("a")
    assert (again.slot, again.weights) == (b.slot, a.weights)


def test_one_at_a_time_begins_with_the_largest_group():
    adapters = OneAtATime(4)
    policy = LargestGroup(adapters)
    for arrival, name in enumerate("abbcbb"):
        policy.add(SimpleNamespace(arrival=arrival, adapter=name, terms=DEFAULT_TERMS))
    assert "".join(one.adapter for one in policy) == "bbbbac"
    held = adapters.claim("a")
    assert adapters.claim("b") is None and adapters.claim("a") is held
    assert "".join(one.adapter for one in policy) == "abbbbc"
    adapters.release(held)
    assert adapters.claim("b") is None
    adapters.release(held)
    assert adapters.claim("b") is not None


class _Bench:
    """A model of 1 GB, a kilobyte of cache for a token, adapters of a megabyte."""

    def backbone_bytes(self, rows, context):
        return 10**9 + 1000 * rows * context

    def adapter_bytes(self, ranks):
        return 10**6 * len(ranks)


def _step(end_s, **fields):
    return Step(
        **{
            "end_s": end_s,
            "waited_s": 0.0,
            "was_ready": False,
            "decodes": True,
            "num_seqs": 2,
            "num_new": 2,
            "kv_tokens": 0,
            "num_adapters": 0,
        }
        | fields
    )


def test_summary_of_steps():
    bench = _Bench()
    steps = [
        _step(1.0),
        _step(1.2, waited_s=0.1, num_new=1, decodes=False),
        _step(1.3, waited_s=0.05, kv_tokens=10**6, num_adapters=2),
        _step(1.5, was_ready=True, num_adapters=1),
    ]
    assert floor_s(bench, steps[2]) == pytest.approx(2.002e9 / 4.3e12)
    found = summary(bench, steps)
    assert found["tokens_per_s"] == pytest.approx(5 / 0.5)
    assert found["decode_ms"] == pytest.approx(150)
    assert found["roofline"] == pytest.approx((2.002 + 1.001) / 4300 / 0.3)
    assert found["longest_step_ms"] == pytest.approx(200)
    assert found["busy"] == pytest.approx(1 - 0.2 / 0.5)
    assert found["waiting"] == pytest.approx(0.15 / 0.5)
    assert found["host_ms"] == pytest.approx(350 / 3)
    inside = _decode_during(steps, [(1.31, 1.4)])
    assert inside["slowest_ms"] == pytest.approx(200)


def test_goals():
    def trace(popularity, method, rate, **fields):
        return {
            "benchmark": "serving_trace",
            "popularity": popularity,
            "method": method,
            "whole": False,
            "tokens_per_s": rate,
            "busy": 0.96,
            "roofline": 0.7,
            **fields,
        }

    batch = {
        "benchmark": "serving_batch",
        "popularity": "distinct",
        "rows": 32,
        "tokens_per_s": 3300.0,
        "all_first_ms": 400.0,
        **vllm("7B", 32, "distinct"),
    }
    assert batch["vllm_none_tokens_per_s"] == 3221 and vllm("7B", 5, "none") == {}
    records = [
        trace("none", "backbone", 1000.0),
        trace("distinct", "mixed", 900.0),
        trace("distinct", "group_swap", 100.0),
        trace("identical", "mixed", 950.0),
        trace("identical", "mixed", 950.0) | {"whole": True},
        batch,
        {"benchmark": "serving_cold", "tier": "disk", "beside": 0, "ms": 20.0},
        {
            "benchmark": "serving_cold",
            "tier": "host",
            "beside": 3,
            "slowest_over_median": 1.4,
        },
        {"benchmark": "serving_copy", "stage_ms": 3.0, "copy_ms": 2.0},
    ]
    met = {goal["goal"]: goal["met"] for goal in goals(records)}
    assert met == {
        "distinct: tokens/s over backbone": True,
        "distinct: tokens/s over group swap": False,
        "distinct: device busy": True,
        "distinct: of the memory roofline in decode": False,
        "identical: tokens/s over backbone": False,
        "identical: device busy": True,
        "identical: of the memory roofline in decode": False,
        "32 requests, distinct: tokens/s": True,
        "32 requests, distinct: all first tokens, ms": False,
        "cold adapter from disk: ms to its first step": True,
        "loads from host: slowest decode step over the median": False,
        "adapter to the device, over a plain copy": True,
    }


def run(tmp_path, monkeypatch, words):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    out = tmp_path / "records.jsonl"
    small = "--shape tiny --seats 2 --max-len 16 --seconds 0.1 --requests 12"
    serving.main([*f"{small} {words}".split(), "--out", str(out), "--commit", "abc"])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(set(provenance.FIELDS) <= set(record) for record in records)
    return records


def of(records, part):
    return [one for one in records if one["benchmark"] == f"serving_{part}"]


def test_the_run_of_the_middle_time_counts():
    times = ((3.0, 40.0), (1.0, 60.0), (2.0, 50.0))
    runs = [{"seconds": s, "all_first_ms": ms, "busy": s} for s, ms in times]
    assert serving_model.middle(runs) == {
        **{"seconds": 2.0, "all_first_ms": 50.0, "busy": 2.0, "runs": 3},
        **{"low_s": 1.0, "high_s": 3.0, "low_first_ms": 40.0, "high_first_ms": 60.0},
    }


@pytest.mark.slow
def test_batch_cold_and_churn(tmp_path, monkeypatch, capsys):
    words = "--parts batch cold churn --batch 8 4 --loads 3 --adapters 18 --slots 2"
    monkeypatch.setattr(device_pools, "locked_bytes", lambda *_: 1 << 20)
    records = run(tmp_path, monkeypatch, words)
    [copy] = of(records, "copy")
    for name in ("stage_ms", "begin_ms", "copy_ms", "place_ms"):
        assert copy[name] > 0
    assert copy["is_locked"]
    for record in of(records, "batch"):
        assert record["runs"] == 3
        assert record["low_s"] <= record["seconds"] <= record["high_s"]
        assert record["low_first_ms"] <= record["all_first_ms"]
        assert record["all_first_ms"] <= record["high_first_ms"]
        assert record["tokens_per_s"] * record["seconds"] == pytest.approx(2 * 4)
        assert 0 < record["all_first_ms"] <= 1e3 * record["seconds"] + 50
    cold = [(one["tier"], one["beside"], one["loads"]) for one in of(records, "cold")]
    assert cold == [("disk", 0, 3), ("host", 0, 3), ("disk", 1, 3), ("host", 1, 3)]
    assert all(one["slowest_over_median"] > 0 for one in of(records, "cold")[2:])
    churn = of(records, "churn")
    assert [(one["law"], one["method"]) for one in churn] == [
        (law, method)
        for law in serving_trace.LAWS
        for method in ("all_there", "loaded")
    ]
    assert all(one["num_cold"] == 0 for one in churn if one["method"] == "all_there")
    assert churn[-1]["num_cold"] > 0 and churn[-1]["cold_p99_ms"] > 0
    assert of(records, "goal")
    assert "serving: churn" in capsys.readouterr().out


@pytest.mark.slow
def test_trace(tmp_path, monkeypatch):
    words = "--parts trace --whole --popularity distinct identical --swap-steps 8"
    records = of(run(tmp_path, monkeypatch, words), "trace")
    cells = [(one["popularity"], one["method"], one["whole"]) for one in records]
    assert cells == [
        ("none", "backbone", False),
        ("none", "backbone", True),
        ("distinct", "mixed", False),
        ("distinct", "mixed", True),
        ("distinct", "group_swap", False),
        ("identical", "mixed", False),
        ("identical", "mixed", True),
        ("identical", "group_swap", False),
    ]
    for record in records:
        adapters, seqs = record["adapters_per_step"], record["seqs_per_step"]
        if record["popularity"] == "none":
            assert adapters == 0
        elif (record["popularity"], record["method"]) == ("distinct", "mixed"):
            assert adapters == seqs > 1
        else:
            assert adapters == 1
    whole = [one for one in records if one["whole"]]
    count = sum(new for _, new in serving_trace.lengths(12, 16))
    for one in whole:
        assert one["tokens_per_s"] * one["seconds"] == pytest.approx(count)


@pytest.mark.slow
def test_a_window_has_a_step_however_slow_it_is(tmp_path, monkeypatch):
    words = "--parts trace --popularity identical --swap-steps 1 --seconds 0"
    for record in of(run(tmp_path, monkeypatch, words), "trace"):
        assert record["steps"] >= 1 and record["tokens_per_s"] > 0


def test_a_batch_that_is_too_long_is_refused(capsys):
    with pytest.raises(SystemExit):
        serving.main(["--batch", "512", "128", "--max-len", "600"])
    assert "--batch must fit --max-len 600" in capsys.readouterr().err
