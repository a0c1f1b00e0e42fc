"""The README's tables of decode steps say what the records say."""

import json
import re

import pytest

from benchmarks import peers, readme_decode, readme_kernels, readme_where
from benchmarks.provenance import RESULTS, ROOT
from tests import benchmark_records as made

STEP = "**punica-jax**, a step"


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
    assert "by rows, 0.15 to 0.35 ms; each is held" in text
    assert "the one shown (NVIDIA H200, JAX 0.0.1, commit abc, 2026" in text
    header, _, *rows = rows_of(text)
    assert header[-3:] == ["allowed", "XLA gather", "group and swap"]
    line = ["7B", "32", "512", "distinct (32)", "6.00", "8.00", "1.33", "+14.3 %", ""]
    assert [*line, "18.00", "28.00"] in rows
    assert ["7B", "1", "512 to 640", "none", "4.06", "5.06", "1.25", *[""] * 4] in rows
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
    times = ["6.00", "7.50", "1.25", "+7.1 %", "7.40: missed"]
    assert line[4:] == [*times, *rivals, "def"]


def case_of(popularity, method, **changed):
    """Return the case of 32 rows at context 512, some of its fields changed."""
    case = {"shape": "7B", "rows": 32, "context": 512}
    case |= {"popularity": popularity, "method": method}
    case |= {"ranks": [] if method == "backbone" else [16]}
    [record] = [r for r in made.decode_records() if case.items() <= r.items()]
    return record | changed


def test_rivals_say_in_which_way_they_are_not_as_ours(results):
    device = case_of("uniform", "gather", launch_ms=15.0)
    host = case_of("skewed", "gather", launch_ms=15.6, overlaps=False)
    write(results, "decode", [*made.decode_records(), device, host])
    rows = rows_of(readme_decode.decode(results))[2:]
    cells = {row[3]: row[-2:] for row in rows if row[:3] == ["7B", "32", "512"]}
    assert cells["uniform (6)"] == ["17.19", "27.19"]
    assert cells["skewed (8)"] == [
        "17.25 (launches in order, the host's time)",
        "27.25",
    ]
    in_order = case_of("skewed", "ours", overlaps=False)
    beside = case_of("uniform", "ours", overlaps=True)
    write(results, "decode", [*made.decode_records(), in_order, beside, host])
    rows = rows_of(readme_decode.decode(results))[2:]
    cells = {row[3]: row[-2:] for row in rows if row[:3] == ["7B", "32", "512"]}
    in_turn = ["17.25 (the host's time)", "27.25 (launches beside each other)"]
    assert cells["skewed (8)"] == in_turn
    assert cells["uniform (6)"] == ["17.19", "27.19"]


def test_rivals_that_are_counted_otherwise_are_not_shown(results):
    new = {"from_second_step": True, "commit": "def"}
    ours = case_of("distinct", "ours", **new)
    gather = case_of("distinct", "gather", **new)

    def rivals(*records):
        write(results, "decode", records)
        rows = rows_of(readme_decode.decode(results))
        [row] = [row for row in rows if row[:4] == ["7B", "32", "512", "distinct (32)"]]
        return dict(zip(rows[0][9:], row[9:], strict=True))

    old = made.decode_records()
    assert rivals(*old) == {"XLA gather": "18.00", "group and swap": "28.00"}
    names = {"XLA gather": "", "group and swap": "", "commit": "def"}
    assert rivals(*old, ours) == names
    assert rivals(*old, ours, gather) == names | {"XLA gather": "18.00"}
    # A step that counts its first launch says so where others do not.
    write(results, "decode", [*old, ours])
    steps = {tuple(row[:4]): row[5] for row in rows_of(readme_decode.decode(results))}
    assert steps["7B", "32", "512", "distinct (32)"] == "8.00"
    assert steps["8B", "32", "512", "distinct (32)"] == "8.00 (first launch counted)"
    # Nor are cases of our own, beside others.
    write(results, "decode", [*old, ours])
    rows = rows_of(readme_decode.decode(results))
    assert [row[3] for row in rows if row[:3] == ["7B", "32", "512"]] == [
        "distinct (32)"
    ]
    # What is not shown has no column, and no source either.
    assert rivals(case_of("distinct", "gather"), ours) == {}
    assert "commit abc" not in readme_decode.decode(results)


def test_engines_do_not_mix_what_is_counted_otherwise(results):
    old = made.decode_records()
    [bare] = [r for r in old if r["rows"] == 32 and is_of_span(r, "none")]
    write(results, "decode", [*old, bare | {"from_second_step": True, "step_ms": 6.5}])
    rows = rows_of(readme_decode.engines(results))
    assert ["7B", "32", STEP, "**6.50**", "", "", "abc"] in rows
    # Other models and rows are of other cases.
    assert ["8B", "32", STEP, "**7.00**", "**7.03**", "**8.00**", "abc"] in rows
    assert ["7B", "1", STEP, "**5.06**", "**5.09**", "**5.09**", "abc"] in rows


def is_of_span(record, popularity):
    wanted = {"shape": "7B", "context": peers.SPAN, "popularity": popularity}
    return wanted.items() <= record.items()


def test_others_are_quoted_beside_ours(results):
    text = readme_decode.engines(results)
    ours = "(NVIDIA H200, JAX 0.0.1, commit abc, 2026-01-02; others: "
    assert f"{ours}{peers.source(peers.END_TO_END)}):" in text
    rows = rows_of(text)[2:]
    ours = ["7B", "32", STEP, "**7.00**", "**7.03**", "**8.00**", "abc"]
    assert rows[rows.index(ours) + 1] == [
        *("7B", "32", "vLLM 0.26.0", "7.26", "9.06", "19.6", "")
    ]
    assert ["8B", "1", STEP, "**5.06**", "**5.09**", "**5.09**", "abc"] in rows
    assert len([row for row in rows if "punica" in row[2]]) == 4


def test_our_engine_by_the_clock(results):
    run = {"benchmark": "serving_batch", "shape": "7B", "rows": 32, "num_new": 128}
    run |= {"popularity": "distinct", "vllm_tokens_per_s": 1342, **made.WHERE}
    # 4096 tokens in 1333 ms; all first ones after 444, so 127 steps in 889.
    run |= {"tokens_per_s": 4096 / 1.333, "all_first_ms": 444.0}
    other = {key: run[key] for key in run if key != "vllm_tokens_per_s"}
    write(results, "serving", [run, other | {"rows": 1}])
    rows = rows_of(readme_decode.engines(results))
    ours = ["7B", "32", "**punica-jax**, its engine", "", "", "**7.00**", "abc"]
    step = ["7B", "32", STEP]
    assert rows[rows.index(ours) - 1][:3] == step
    assert len([row for row in rows if "its engine" in row[2]]) == 1


def test_ranks(results):
    line = ["7B", "32", "512", "distinct (32)", "8, 16, 64", "8.00", "8.50"]
    line.append("8.76: met")
    assert rows_of(readme_decode.ranks(results))[2:] == [line]


def test_products(results):
    header, _, *cells = rows_of(readme_kernels.products(results))
    # `ragged_dot` was not measured.
    assert header[2:] == ["XLA gather", "loop over adapters"]
    ratios = ["0.75 (6 of 6)", "0.79 (4 of 6)", "0.50 (6 of 6)"]
    assert cells == [["decode", *ratios], ["all", *ratios]]


def test_products_of_all_suites_and_of_steps(results):
    cells = made.sgmv_records()
    long = cells[-1] | {"cell": "long", "suite": "prefill", "ours_us": 12.0}
    few = [cell | {"ours_rows_us": 4.0} for cell in cells if cell["rows"] == 1]
    write(results, "sgmv", [*cells, long, *few])
    _, _, *rows = rows_of(readme_kernels.products(results))
    assert [row[:3] for row in rows] == [
        ["decode", "0.75 (6 of 6)", "0.79 (4 of 6)"],
        ["prefill", "1.50 (0 of 1)", "1.00 (0 of 1)"],
        ["all", "0.83 (6 of 7)", "0.82 (4 of 7)"],
        ["as in a step of up to 64 rows", "0.50 (2 of 2)", "1.33 (0 of 2)"],
    ]


def test_rivals_that_the_host_bounds_do_not_count(results):
    cells = made.sgmv_records()
    host = [cell | {"gather_launch_us": 0.91 * cell["gather_us"]} for cell in cells[:2]]
    fine = [cell | {"gather_launch_us": 0.9 * cell["gather_us"]} for cell in cells[2:]]
    write(results, "sgmv", [*host, *fine])
    row = rows_of(readme_kernels.products(results))[2]
    # One of them is shorter than ours all the same.
    assert row[1:3] == ["0.75 (6 of 6)", "0.87 (3 of 5)"]


def test_goals(results):
    spans = [
        record | {"vllm_none_ms": 7.26 if record["shape"] == "7B" else 8.0}
        for record in made.decode_records()
        if record["context"] == peers.SPAN
    ]
    steps = [r for r in made.decode_records() if r["context"] != peers.SPAN]
    bare = case_of("none", "backbone", step_ms=6.6, commit="def")
    judged = case_of("distinct", "ours", allowed_ms=7.2, adapters_ms=0.6, met=False)
    # A try-out of two layers says nothing of a model.
    tried = case_of("none", "backbone", step_ms=0.5, layers=2)
    write(results, "decode", [*spans, *steps, bare, judged, tried])
    text = readme_decode.goals(results)
    assert "commit abc, 2026-01-02; NVIDIA H200, JAX 0.0.1, commit def" in text
    header, _, *rows = rows_of(text)
    assert header == ["goal", "wanted", "measured", "met", "commit"]
    assert [row[1:] for row in rows] == [
        ["< 7.26 ms", "8.00 ms", "no", "abc"],
        ["< 8.00 ms", "8.00 ms", "no", "abc"],
        ["<= 1.15", "1.25", "no", "abc"],
        ["<= 1.15", "1.10", "yes", "def"],
        *[["", "not measured", "no", ""]] * 4,
        ["<= 7.20 ms", "8.00 ms", "no", "abc"],
        ["<= 7.30 ms", "8.00 ms", "no", "abc"],
        *[["", "not measured", "no", ""]] * 12,
        ["<= 8.76 ms", "8.50 ms", "yes", "abc"],
        ["every cell", "6 of 6", "yes", "abc"],
        ["<= 0.75", "0.75", "yes", "abc"],
        ["every cell", "4 of 6", "no", "abc"],
        ["every cell", "not measured", "no", "abc"],
    ]
    assert [row[0].split(":")[0].split(",")[0] for row in rows[:3]] == [
        "7B",
        "8B",
        "7B",
    ]


def product_record(benchmark, method, **fields):
    about = {"benchmark": benchmark, "width": 4096, "rows": 32, "method": method}
    about |= {"us": 5.04, "launch_us": 3.0, "floor_us": 2.0}
    return {**about, **fields, **made.WHERE}


def test_small_benchmarks_have_tables_once_they_have_records(results):
    tables = [readme_kernels.adapters, readme_kernels.loaded, readme_kernels.order]
    tables += [readme_kernels.ceilings, readme_kernels.attention]
    assert [table(results) for table in tables] == [""] * 5
    adapters = [
        product_record("adapters_op", "gather", adapters=32, launch_us=4.9),
        product_record("adapters_op", "segments", adapters=32),
        product_record("adapters_op", "segments", adapters=8, us=4.0),
    ]
    write(results, "adapters", adapters)
    methods = ["punica-jax (segments)", "XLA gather"]
    assert rows_of(readme_kernels.adapters(results)) == [
        ["width", "rows", "adapters", "floor", *methods],
        ["---"] * 6,
        ["4096", "32", "8", "2.0", "4.0 (2.0)", ""],
        ["4096", "32", "32", "2.0", "5.0 (2.5)", "5.0 (2.5) (the host)"],
    ]
    orders = [
        product_record("order", method, popularity=popularity, order=order)
        for popularity in ("distinct", "uniform")
        for order in ("sorted", "shuffled")
        for method in ("segments", "per_row")
    ]
    write(results, "order", orders)
    _, _, *rows = rows_of(readme_kernels.order(results))
    assert [row[2:4] for row in rows] == [
        ["uniform", "sorted"],
        ["uniform", "shuffled"],
        ["distinct", "sorted"],
        ["distinct", "shuffled"],
    ]
    assert rows[0] == [
        "4096",
        "32",
        "uniform",
        "sorted",
        "2.0",
        "5.0 (2.5)",
        "5.0 (2.5)",
    ]


def test_steps_by_adapters_loaded(results):
    steps = [
        record | {"in_batch": min(record["adapters"], 32), "floor_ms": 5.0}
        for record in made.adapters_records()
        if record["benchmark"] == "adapters_step"
    ]
    write(results, "adapters", steps)
    _, _, none, *_, most = rows_of(readme_kernels.loaded(results))
    assert none == ["7B", "32", "0", "0", "5.00", "6.00", "1.20", ""]
    assert most == ["7B", "32", "1000", "32", "5.00", "7.00", "1.40", "+16.7 %"]


def test_attention_and_ceilings(results):
    [ceilings] = made.ceiling_records()
    new = ceilings | {"read_mb": 1024, "width": 8192}
    write(results, "ceilings", [new | {"bytes_per_s": 1e12}, new])
    cells = rows_of(readme_kernels.ceilings(results))[2:]
    assert cells == [["1024 MB", "4.00", "8192 x 8192", "780"]]
    attention = {
        "benchmark": "attention",
        "case": "8b-32x1-512",
        "seqs": 32,
        **made.WHERE,
    }
    attention |= {"query_len": 1, "kv_len": 512, "us": 19.54, "floor_us": 15.7}
    write(results, "attention", [attention | {"us": 1.0}, attention])
    text = readme_kernels.attention(results)
    assert "or all operations at 790 TFLOP/s" in text
    assert rows_of(text)[2:] == [["8B", "32", "1", "512", "15.7", "19.5", "1.24"]]


def test_plots_are_linked_from_the_root(results):
    assert readme_decode.plots(results) == ""
    (results / "order.png").touch()
    [target] = re.findall(r"\((.+)\)", readme_decode.plots(results))
    assert (ROOT / target).samefile(results / "order.png")
    assert "](benchmarks/results/latency.png)" in readme_decode.plots(RESULTS)


def test_profiles_are_the_last_and_the_first(results):
    text = readme_where.where(results)
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
    first, second = readme_where.where(results).split("\n\n8B, 32 rows")
    assert "XLA gather" not in first
    assert rows_of(second)[0] == ["kernels", "distinct, XLA gather, abc"]


def test_profiles_of_prefill_follow_those_of_decode(results):
    records = made.where_records()
    prefill = [record | {"rows": 4, "query_len": 512} for record in records]
    write(results, "where", [*prefill, *records])
    text = readme_where.where(results)
    decode, prefill = text.split("\n\n7B, 4 chunks of 512 tokens of prompts of 512:")
    assert "\n\n7B, 32 rows, context 512:" in decode
    assert rows_of(decode) == rows_of(prefill)


def test_launches_and_draws_are_judged(results):
    text = readme_decode.around(results)
    assert "commit abc, 2026-01-02; NVIDIA H200, JAX 0.0.1, commit def" in text
    _, _, launch, *draws = rows_of(text)
    what = "host's launch of a step, 32 layers"  # the newest record
    assert launch == [what, "32", "1250", "", "1 ms: missed", "abc"]
    assert [row[1:] for row in draws] == [
        ["32", "196", "2.80 %", "3 %: met", "def"],
        ["32", "300", "4.29 %", "3 %: missed", "def"],
        ["32", "70", "1.00 %", "", "def"],
        ["1", "196", "3.87 %", "", "def"],
        ["1", "300", "5.93 %", "", "def"],
        ["1", "70", "1.38 %", "", "def"],
        # There is no step of five rows.
        *(["5", us, "", "", "def"] for us in ("196", "300", "70")),
    ]
    assert draws[0][0] == "draw, vocabulary of 32000"
    [draw, *_] = [r for r in made.around_records() if r["benchmark"] == "sampling"]
    write(results, "around", [draw | {"launch_us": 0.95 * draw["us"]}])
    assert "(the host)" in rows_of(readme_decode.around(results))[2][2]


def test_without_results_others_alone_are_left(tmp_path):
    text = readme_decode.measured(tmp_path)
    assert text == readme_decode.engines(tmp_path)
    assert "punica-jax" not in text


def test_quoted_figures_are_whole():
    for name in (peers.KERNELS, peers.END_TO_END):
        assert peers.load(name) and "2026-11-21" in peers.source(name)
    assert peers.step_to_beat_ms("8B", 32) == 5.66
    assert peers.step_to_beat_ms("8B", 5) is None
