"""The README's tables of decode steps say what the records say."""

import json

import pytest

from benchmarks import peers, readme_decode
from tests import benchmark_records as made


@pytest.fixture
def results(tmp_path):
    parts = {
        "decode": made.decode_records(),
        "sgmv": made.sgmv_records(),
        "where": made.where_records(),
        "around": made.around_records(),
    }
    for name, records in parts.items():
        write(tmp_path, name, records)
    (tmp_path / "decode_cpu.jsonl").write_text('{"benchmark": "decode"}\n')
    return tmp_path


def rows_of(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def write(results, benchmark, records):
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (results / f"{benchmark}_h200.jsonl").write_text(lines)


def test_decode(results):
    text = readme_decode.decode(results)
    assert "by rows, 0.15 to 0.35 ms (NVIDIA H200, JAX 0.0.1, commit abc, 2026" in text
    header, _, *rows = rows_of(text)
    assert header[-3:] == ["allowed", "XLA gather", "group and swap"]
    line = ["7B", "32", "512", "distinct (32)", "6.00", "8.00", "+14.3 %", ""]
    assert [*line, "18.00", "28.00"] in rows
    assert ["7B", "1", "512 to 640", "none", "4.06", "5.06", *[""] * 4] in rows
    assert len(rows) == 2 * 2 * (2 + 5)


def test_decode_is_sorted_and_shows_the_newest_of_each_case(results):
    records = made.decode_records()
    case = {"shape": "7B", "rows": 32, "context": 512, "popularity": "uniform"}
    judged = {"step_ms": 7.5, "allowed_ms": 7.4, "met": False, "commit": "def"}
    new = [r | judged for r in records if case.items() <= r.items()][:1]
    # As if cases had been measured in any order, but in the order of time.
    write(results, "decode", [*reversed(records), *new])
    header, _, *rows = rows_of(readme_decode.decode(results))
    assert header[-1] == "commit"
    order = ["none", "identical (1)", "uniform (6)", "skewed (8)", "distinct (32)"]
    assert [row[3] for row in rows] == (order[:2] * 2 + order * 2) * 2
    assert [row[:3] for row in rows[:5:2]] == [
        ["7B", "1", "512"],
        ["7B", "1", "512 to 640"],
        ["7B", "32", "512"],
    ]
    [line] = [row for row in rows if row[-1] == "def"]
    # Rivals of another commit say so.
    assert line[:4] == ["7B", "32", "512", "uniform (6)"]
    rivals = ["17.19 (abc)", "27.19 (abc)"]
    assert line[4:] == ["6.00", "7.50", "+7.1 %", "7.40: missed", *rivals, "def"]


def test_others_are_quoted_beside_ours(results):
    text = readme_decode.engines(results)
    ours = "(NVIDIA H200, JAX 0.0.1, commit abc, 2026-01-02; others: "
    assert f"{ours}{peers.source(peers.END_TO_END)}):" in text
    rows = rows_of(text)[2:]
    ours = ["7B", "32", "**punica-jax**", "**7.00**", "**7.03**", "**8.00**"]
    assert rows[rows.index(ours) + 1] == [
        *("7B", "32", "vLLM 0.26.0", "7.26", "9.06", "19.6")
    ]
    assert ["8B", "1", "**punica-jax**", "**5.06**", "**5.09**", "**5.09**"] in rows
    assert len([row for row in rows if "punica" in row[2]]) == 4


def test_ranks_and_products(results):
    line = ["7B", "32", "512", "distinct (32)", "8, 16, 64", "8.00", "8.50"]
    line.append("8.76: met")
    assert rows_of(readme_decode.ranks(results))[2:] == [line]
    header, _, cells = rows_of(readme_decode.products(results))
    assert header[2:] == ["XLA gather", "`ragged_dot`", "loop over adapters"]
    assert cells == ["decode", "0.75 (6 of 6)", "0.79 (4 of 6)", "", "0.50 (6 of 6)"]


def test_profiles_are_the_last_and_the_first(results):
    text = readme_decode.where(results)
    assert "commit abc" in text and "commit def" in text and "mid" not in text
    assert "\n\n7B, 32 rows, context 512:\n\n| kernels |" in text
    header, _, *rows = rows_of(text)
    assert header == ["kernels", "no adapter, abc", "distinct, def (abc)"]
    assert rows == [
        ["base products", "5000", "4000 (5000)"],
        ["norms", "110", "110 (110)"],
        ["gaps", "", "20 (30)"],
        ["step", "", "6780 (6770)"],
    ]


def test_each_model_has_profiles_of_its_own(results):
    records = made.where_records()
    other = [record | {"shape": "8B", "method": "gather"} for record in records[:4]]
    write(results, "where", [*other, *records])
    first, second = readme_decode.where(results).split("\n\n8B, 32 rows")
    assert "XLA gather" not in first
    assert rows_of(second)[0] == ["kernels", "distinct, XLA gather, abc"]


def test_launches_and_draws_are_judged(results):
    text = readme_decode.around(results)
    assert "commit abc, 2026-01-02; NVIDIA H200, JAX 0.0.1, commit def" in text
    _, _, launch, *draws = rows_of(text)
    what = "host's launch of a step, 32 layers"  # the newest record
    assert launch == [what, "32", "1250", "", "1 ms: missed", "abc"]
    assert [row[1:] for row in draws] == [
        ["32", "196", "2.8 %", "3 %: met", "def"],
        ["32", "300", "4.3 %", "3 %: missed", "def"],
        ["32", "70", "1.0 %", "", "def"],
        ["1", "196", "3.9 %", "", "def"],
        ["1", "300", "5.9 %", "", "def"],
        ["1", "70", "1.4 %", "", "def"],
        # There is no step of five rows.
        *(["5", us, "", "", "def"] for us in ("196", "300", "70")),
    ]
    assert draws[0][0] == "draw, vocabulary of 32000"


def test_without_results_others_alone_are_left(tmp_path):
    text = readme_decode.measured(tmp_path)
    assert text == readme_decode.engines(tmp_path)
    assert "punica-jax" not in text


def test_quoted_figures_are_whole():
    for name in (peers.KERNELS, peers.END_TO_END):
        assert peers.load(name) and "2026-11-21" in peers.source(name)
    assert peers.step_to_beat_ms("8B", 32) == 5.66
    assert peers.step_to_beat_ms("8B", 5) is None
