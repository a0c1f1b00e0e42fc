import json
from pathlib import Path

import pytest

from benchmarks import device_time, sampling


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(device_time, "COLD_BYTES", 1)
    monkeypatch.setattr(device_time, "_WINDOW_S", 1e-4)


def test_every_case_is_timed(tmp_path):
    out = tmp_path / "figures" / "sampling.jsonl"
    # The other filters are the same launch.
    names = ["greedy", "top_k", "draw", "logprobs"]
    words = ["--rows", "3", "--vocab", "600", "--commit", "c", "--out", str(out)]
    sampling.main([*words, "--cases", *names])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["case"] for r in records] == names
    assert set(names) < set(sampling.cases(3, 600))
    for record in records:
        assert record["us"] > 0 and (record["rows"], record["vocab"]) == (3, 600)
        assert record["share"] == pytest.approx(record["us"] / 6290)


def test_what_was_measured_meets_its_budget():
    path = Path(sampling.__file__).parent / "results" / "sampling_h200.jsonl"
    records = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        records[record["case"]] = record
    for case in ("greedy", "temperature", "top_k", "top_p", "draw"):
        record = records[case]
        assert (record["rows"], record["vocab"]) == (32, 128256)
        assert record["share"] <= sampling.BUDGET == 0.03, case
