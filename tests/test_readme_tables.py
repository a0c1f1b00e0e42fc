"""The README's tables say what the records say."""

import json

import pytest

from benchmarks import peers, readme_tables
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
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{name}_h200.jsonl").write_text(lines)
    (tmp_path / "decode_cpu.jsonl").write_text('{"benchmark": "decode"}\n')
    return tmp_path


def rows_of(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_decode(results):
    text = readme_tables.decode(results)
    assert "(NVIDIA H200, JAX 0.0.1, commit abc, 2026-01-02)" in text
    header, _, *rows = rows_of(text)
    assert header[-3:] == ["over no adapter", "XLA gather", "group and swap"]
    line = ["7B", "32", "512", "distinct (32)", "6.00", "8.00", "+14.3 %"]
    assert [*line, "18.00", "28.00"] in rows
    assert ["7B", "1", "512 to 640", "none", "4.06", "5.06", "", "", ""] in rows
    assert len(rows) == 2 * 2 * (2 + 5)


def test_others_are_quoted_beside_ours(results):
    text = readme_tables.engines(results)
    assert peers.source(peers.END_TO_END) in text
    rows = rows_of(text)[2:]
    ours = ["7B", "32", "**punica-jax**", "**7.00**", "**7.03**", "**8.00**"]
    assert rows[rows.index(ours) + 1] == [
        *("7B", "32", "vLLM 0.26.0", "7.26", "9.06", "19.6")
    ]
    assert ["8B", "1", "**punica-jax**", "**5.06**", "**5.09**", "**5.09**"] in rows
    assert len([row for row in rows if "punica" in row[2]]) == 4


def test_ranks_products_and_profiles(results):
    line = ["7B", "32", "distinct (32)", "8, 16, 64", "8.00", "8.76", "8.50"]
    assert rows_of(readme_tables.ranks(results))[2:] == [line]
    header, _, cells = rows_of(readme_tables.products(results))
    assert header[2:] == ["XLA gather", "`ragged_dot`", "loop over adapters"]
    assert cells == ["decode", "0.75 (6 of 6)", "0.79 (4 of 6)", "", "0.50 (6 of 6)"]
    header, _, *rows = rows_of(readme_tables.where(results))
    assert header[1:] == [f"7B, 32 rows, distinct, ours, {c}" for c in ("abc", "def")]
    assert rows == [
        ["base products", "5000", "5000"],
        ["gaps", "30", "30"],
        ["step", "6800", "6800"],
    ]


def test_launches_and_draws_are_judged(results):
    text = readme_tables.around(results)
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
    text = readme_tables.measured(tmp_path)
    assert text == readme_tables.engines(tmp_path)
    assert "punica-jax" not in text


def test_quoted_figures_are_whole():
    for name in (peers.KERNELS, peers.END_TO_END):
        assert peers.load(name) and "2026-11-21" in peers.source(name)
    assert peers.step_to_beat_ms("8B", 32) == 5.66
    assert peers.step_to_beat_ms("8B", 5) is None
