import json
from itertools import product
from pathlib import Path

import pytest

from benchmarks import scheduling


@pytest.mark.slow
def test_every_policy_is_timed_in_every_case(tmp_path):
    out = tmp_path / "records.jsonl"
    words = ["--running", "3", "--waiting", "7", "--tenants", "2", "--steps", "4"]
    scheduling.main([*words, "--commit", "c", "--out", str(out)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    cells = [(record["policy"], record["case"]) for record in records]
    assert cells == [(p, c) for p in scheduling.POLICIES for c in scheduling.CASES]
    for record in records:
        num_tenants = 10 if record["case"] == "tenants" else 2
        sizes = record["running"], record["waiting"], record["tenants"]
        assert sizes == (3, 7, num_tenants)
        assert 0 < record["schedule_ms"] <= record["step_ms"]
        for name in ("schedule", "step", "look"):
            median, p90, most = (record[f"{name}{x}_ms"] for x in ("", "_p90", "_max"))
            assert 0 < median <= p90 <= most


def make_bench(case):
    policy = scheduling.FirstComeFirstServed()
    return scheduling.Bench(case, policy, running=3, waiting=9)


@pytest.mark.parametrize("case", [c for c in scheduling.CASES if c != "shared"])
def test_what_is_timed_is_a_full_house_and_a_long_queue(case):
    bench = make_bench(case)
    for _ in range(5):
        bench.refill()
        bench.step()
    scheduler = bench.scheduler
    scheduler.check_integrity()
    assert len(scheduler.running) == 3 and scheduler.num_waiting == 9
    scheduled = scheduler.schedule(may_preempt=True)
    assert scheduled is not None and [rows for _, rows in scheduled] == [1] * 3


def test_those_that_share_sit_down_as_soon_as_they_can():
    bench = make_bench("shared")
    scheduler = bench.scheduler
    for _ in range(4):  # one of them is computed, and all others wait for it
        assert scheduler.num_waiting in (8, 9)
        bench.step()
    for _ in range(3):
        bench.refill()
        num_waiting = scheduler.num_waiting
        assert 9 <= num_waiting < 9 + 3
        bench.step()
        scheduler.check_integrity()
        # Three had a seat, and went.
        assert len(scheduler.running) == 3
        assert scheduler.num_waiting == num_waiting - 3


# How many looks at all sequences choosing took, in several runs of both Pythons.
LOOKS = {
    "first_come": {"full": 2.6, "tenants": 1.8, "missing": 4.3, "shared": 4},
    "latency": {"full": 1.5, "tenants": 1.7, "missing": 3.3, "shared": 3.3},
    "fair_share": {"full": 3, "tenants": 3.6, "missing": 5.3, "shared": 5.3},
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", scheduling.POLICIES)
@pytest.mark.parametrize("case", scheduling.CASES)
def test_a_step_is_chosen_in_time(case, policy):
    """Three times what was measured is allowed, of the time that Python takes here."""
    make = scheduling.POLICIES[policy]
    bench = scheduling.Bench(case, make(), running=256, waiting=1000, tenants=100)
    measured = scheduling.measure(bench, steps=100)
    assert measured["schedule_ms"] < 3 * LOOKS[policy][case] * measured["look_ms"]


def recorded():
    path = Path(scheduling.__file__).parent / "results" / "scheduling_cpu.jsonl"
    records = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        records[record["policy"], record["case"]] = record
    return records


def test_what_was_measured_meets_its_goal():
    records = recorded()
    assert records.keys() == set(product(scheduling.POLICIES, scheduling.CASES))
    for cell, record in records.items():
        assert (record["running"], record["waiting"]) == (256, 1000)
        assert record["schedule_ms"] < scheduling.GOAL_MS == 1.0, cell
