import json

import pytest

from benchmarks import device_time, sampling
from benchmarks.decode_goals import judge_sampling


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(device_time, "COLD_BYTES", 1)
    monkeypatch.setattr(device_time, "_WINDOW_S", 1e-4)


@pytest.fixture
def run(tmp_path):
    def call(*words):
        out = tmp_path / "figures" / "sampling.jsonl"
        sampling.main([*words, "--commit", "c", "--out", str(out)])
        return [json.loads(line) for line in out.read_text().splitlines()]

    return call


def test_cases_are_timed(run):
    # The other filters are the same launch.
    names = ["greedy", "top_k", "draw", "logprobs"]
    records = run("--rows", "3", "--vocab", "600", "--cases", *names)
    assert [r["case"] for r in records] == names
    for record in records:
        assert record["us"] > 0 and (record["rows"], record["vocab"]) == (3, 600)


def test_all_cases_are_the_default(run, monkeypatch):
    timed = []
    times = device_time.Times(median_s=1.0, launch_s=0.5)
    monkeypatch.setattr(
        sampling, "run_case", lambda *sizes: timed.append(sizes) or times
    )
    monkeypatch.setattr(sampling, "filter_case", lambda rows, names: names)
    for name in ("greedy_case", "llm_case", "logprobs_case"):
        monkeypatch.setattr(sampling, name, lambda *sizes: "other")
    found = [(r["rows"], r["case"]) for r in run("--rows", "1", "32")]
    filters = ["temperature", "top_k", "top_p", "min_p", "all filters"]
    names = ["greedy", *filters, "draw", "logprobs"]
    assert found == [(rows, name) for rows in (1, 32) for name in names]
    assert (("top_k", "top_p", "min_p"), 32, 128256) in timed


def test_share_is_of_a_step_with_the_vocabulary_that_was_drawn_from():
    step = {"shape": "7B", "rows": 32, "context": 512, "popularity": "none"}
    steps = [{**step, "step_ms": ms} for ms in (99.0, 6.0)]
    steps += [{**steps[0], **other} for other in ({"rows": 1}, {"shape": "8B"})]
    draw = {"case": "draw", "rows": 32, "vocab": 32000, "us": 180.0}
    judged = judge_sampling(draw, steps)
    assert judged["share"] == pytest.approx(0.03) and judged["met"] is True
    assert judge_sampling({**draw, "us": 181.0}, steps)["met"] is False
    # 4.3 MB more of the head take a microsecond: 525 columns of 4096, two bytes each.
    wider = judge_sampling({**draw, "vocab": 32000 + 525 * 1000}, steps)
    assert wider["step_ms"] == pytest.approx(7.0, rel=1e-3)
    # The goal speaks of 32 rows, and of what every request needs.
    assert "met" not in judge_sampling({**draw, "rows": 1}, steps)
    assert "met" not in judge_sampling({**draw, "case": "logprobs"}, steps)
    assert "share" not in judge_sampling({**draw, "rows": 2}, steps)
    # A time that is the host's says nothing.
    assert "met" not in judge_sampling({**draw, "launch_us": 175.0}, steps)
