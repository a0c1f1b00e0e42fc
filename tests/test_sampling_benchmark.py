import json

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
