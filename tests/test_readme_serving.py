"""The README's tables of serving say what the records say."""

import json

import pytest

from benchmarks import peers, readme_serving
from tests import benchmark_records as made

ABOUT = "(NVIDIA H200, JAX 0.0.1, commit abc, 2026-01-02"


@pytest.fixture
def results(tmp_path):
    write(tmp_path, made.serving_records())
    return tmp_path


def write(results, records):
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (results / "serving_h200.jsonl").write_text(lines)


def lines_of(text):
    """Return a table's lines, without the rule below its header."""
    header, _, *lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [header, *lines]


def test_trace(results):
    text = readme_serving.trace(results)
    assert "all bytes read once at 4.3 TB/s" in text and f"{ABOUT}):" in text
    figures = "3200 | 8.26 | 75.1 % | 95.7 % |"
    assert lines_of(text) == [
        "| model | in flight | requests | adapters | method | tokens/s | decode step "
        "| of the roofline | busy |",
        f"| 7B | 32 | steady | none | backbone alone | {figures}",
        f"| 7B | 32 | steady | distinct | one mixed batch | {figures}",
        f"| 7B | 32 | all | none | backbone alone | {figures}",
        f"| 7B | 32 | all | distinct | one mixed batch | {figures}",
    ]


def test_batch_is_beside_what_is_quoted(results):
    text = readme_serving.batch(results)
    assert f"{ABOUT}; vLLM's: {peers.source(peers.WHOLE_RUNS)}):" in text
    sent = "| 7B | 32 | 512 + 128 | 2048"
    assert lines_of(text)[1:] == [
        f"{sent} | 3 | none | **3200** |  | **421** |  |",
        f"{sent} | 1 | distinct | **3200** | 1342 | **421** | 572 |",
    ]
    slower = [
        record | {"tokens_per_s": 1341.0, "all_first_ms": 573.0}
        for record in made.serving_records()
        if record["benchmark"] == "serving_batch" and "vllm_all_first_ms" in record
    ]
    write(results, slower)
    (line,) = lines_of(readme_serving.batch(results))[1:]
    assert line.endswith("| distinct | 1341 | **1342** | 573 | **572** |")


def test_cold_adapters_and_copies(results):
    assert lines_of(readme_serving.cold(results))[1:] == [
        "| 7B | disk | 0 | 20.0 | 40.0 |  |  |",
        "| 7B | host | 0 | 2.5 | 5.0 |  |  |",
        "| 7B | disk | 31 | 20.0 | 40.0 | 8.00 | 1.25 |",
        "| 7B | host | 31 | 2.5 | 5.0 | 8.00 | 1.25 |",
    ]
    assert lines_of(readme_serving.copy(results)) == [
        "| model | adapter | to the device | begun in, ms | plain copy |",
        "| 7B | 80.0 MB | 4.00 ms, 20.0 GB/s | 0.50 | 2.00 ms, 40.0 GB/s |",
    ]


def test_churn(results):
    about = "| 7B | 1000 | 32 | zipf"
    assert lines_of(readme_serving.churn(results)) == [
        "| model | adapters | slots | popularity | adapters are | tokens/s "
        "| warm | p50 / p99 | cold | p50 / p99 |",
        f"{about} | on the device | 3200 | 90 | 20 / 51 | 0 |  |",
        f"{about} | on disk | 3200 | 90 | 20 / 51 | 40 | 60 / 99 |",
    ]


def test_scheduling_is_the_last_of_its_size(results):
    about = {"benchmark": "scheduling", "policy": "fair_share", "case": "full"}
    about |= {"running": 256, "waiting": 1000, "cpu": "A core", **made.WHERE}
    records = [
        {**about, "schedule_ms": 2.0, "step_ms": 3.0},
        {**about, "schedule_ms": 1.0, "step_ms": 1.234},
        {**about, "case": "shared", "schedule_ms": 0.456, "step_ms": 1.5},
        {**about, "waiting": 9, "schedule_ms": 0.1, "step_ms": 0.2},
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (results / "scheduling_cpu.jsonl").write_text(text)
    text = readme_serving.scheduling(results)
    assert text in readme_serving.measured(results)
    assert "; A core):" in text
    waits = "with one beginning, and sit down as rows are left"
    assert lines_of(text) == [
        "| policy | others wait | rows chosen | goal | met | all of it |",
        "| fair share | for a seat | 1.00 | 1 | no | 1.23 |",
        f"| fair share | {waits} | 0.46 | 1 | yes | 1.50 |",
    ]


def test_goals_are_the_last_ones_and_name_mixed_commits(results):
    records = made.serving_records()
    [goal] = [one for one in records if one.get("goal") == "tokens/s"]
    new = goal | {"measured": 3333.3, "met": True, "commit": "def"}
    write(results, [*records, new])
    text = readme_serving.goals(results)
    assert f"{ABOUT}; NVIDIA H200, JAX 0.0.1, commit def, 2026-01-02):" in text
    assert lines_of(text) == [
        "| model | goal | wanted | measured | met | commit |",
        "| 7B | distinct: device busy | >= 0.95 | 0.957 | yes | abc |",
        "| 7B | tokens/s | >= 3221 | 3333 | yes | def |",
    ]
    write(results, records)
    last = lines_of(readme_serving.goals(results))[-1]
    assert last == "| 7B | tokens/s | >= 3221 | 3200 | no |"


def test_parts_without_records_are_absent(results):
    assert len(readme_serving.measured(results).split("\n\n")) == 2 * 6
    records = made.serving_records()
    write(results, [one for one in records if one["benchmark"] == "serving_cold"])
    assert readme_serving.measured(results) == readme_serving.cold(results)
    write(results, [])
    assert readme_serving.measured(results) == ""


def test_clusters(results):
    assert readme_serving.clusters(results) == readme_serving.moves(results) == ""
    write(results, made.cluster_records())
    scaling, moves = readme_serving.clusters(results), readme_serving.moves(results)
    assert lines_of(scaling) == [
        "| model | engines | requests | decode step | tokens/s |",
        "| 7B | 1 | 32 | 5.40 | 5900 |",
        "| 7B | 2 | 64 | 5.20 | 12300 |",
    ]
    assert lines_of(moves) == [
        "| model | requests | tokens of each | median | slowest "
        "| between tokens else |",
        "| 7B | 32 | 224 | 366 | 603 | 5.7 |",
    ]
    assert ABOUT in scaling and ABOUT in moves
