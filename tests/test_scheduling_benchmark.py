import json

from benchmarks import scheduling


def test_every_policy_is_timed_in_every_case(tmp_path):
    out = tmp_path / "records.jsonl"
    words = ["--running", "3", "--waiting", "7", "--tenants", "2", "--steps", "4"]
    scheduling.main([*words, "--commit", "c", "--out", str(out)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    cells = [(record["policy"], record["case"]) for record in records]
    assert cells == [(p, c) for p in scheduling.POLICIES for c in scheduling.CASES]
    for record in records:
        assert (record["running"], record["waiting"], record["tenants"]) == (3, 7, 2)
        assert 0 < record["schedule_ms"] <= record["step_ms"]


def test_what_is_timed_is_a_full_house_and_a_long_queue():
    for case in scheduling.CASES:
        bench = scheduling.Bench(
            case, scheduling.FirstComeFirstServed(), running=3, waiting=9
        )
        for _ in range(5):
            bench.step()
        scheduler = bench.scheduler
        scheduler.check_integrity()
        assert len(scheduler.running) == 3 and scheduler.num_waiting == 9
        scheduled = scheduler.schedule(may_preempt=True)
        assert scheduled is not None and [rows for _, rows in scheduled] == [1] * 3
