"""Plots say what they show, and draw what the records say."""

import itertools
import json
import re

import pytest
from matplotlib.image import imread

from benchmarks import plot_records, plots
from benchmarks.provenance import load
from tests import benchmark_records as made

WIDTH = {"width": 4096}
ORDER = [record | WIDTH for record in made.order_records()]
ADAPTERS = [record | WIDTH for record in made.adapters_records()]
RECORDS = [
    *made.decode_records(),
    *made.sgmv_records(),
    *ADAPTERS,
    *ORDER,
    *made.ceiling_records(),
]


def texts(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


def line(axis, label):
    (found,) = [drawn for drawn in axis.get_lines() if drawn.get_label() == label]
    return list(found.get_xdata()), list(found.get_ydata())


def test_latency():
    figure = plots.draw_latency(RECORDS)
    assert "NVIDIA H200, JAX 0.0.1, commit abc, 2026-01-02" in figure.get_suptitle()
    assert [axis.get_title() for axis in figure.axes] == ["7B shape", "8B shape"]
    axis = figure.axes[0]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("rows", "ms a step")
    # One row stands for every popularity; spans and mixed ranks are another matter.
    assert line(axis, "distinct") == ([1, 32], [5.0 + 1 / 16 + 1 / 32, 8.0])
    assert line(axis, "none") == ([1, 32], [5.0 + 1 / 16, 7.0])
    assert texts(axis)[-1] == "none, all bytes once"


def test_latency_goes_as_far_as_records_go():
    steps = made.decode_records()
    more = {"rows": 64, "popularity": "uniform", "step_ms": 9.5}
    [uniform] = [r for r in steps if line_of(r) == ("7B", 512, "uniform", "ours")]
    skewed = [r for r in steps if line_of(r) == ("7B", 512, "skewed", "ours")]
    steps = [record for record in [*steps, uniform | more] if record not in skewed]
    axis, other = plots.draw_latency(steps).axes
    assert line(axis, "uniform")[0] == [1, 32, 64] and line(axis, "none")[0] == [1, 32]
    # One row's step alone is no measurement of a popularity.
    assert "skewed" not in texts(axis) and "skewed" in texts(other)
    looks = [(drawn.get_marker(), drawn.get_linewidth()) for drawn in axis.get_lines()]
    assert all(len(set(look)) == len(looks) for look in zip(*looks, strict=True))
    assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > 1.05 * 9.5


def line_of(record):
    return tuple(record[n] for n in ("shape", "context", "popularity", "method"))


def test_steps_that_count_the_first_launch_stand_beside_no_others():
    steps = [record for record in made.decode_records() if record["context"] == 512]
    new = [
        record | {"from_second_step": True, "step_ms": 2.5}
        for record in steps
        if line_of(record)[2:] in (("none", "backbone"), ("distinct", "ours"))
        and record["ranks"] in plot_records.RANKS
    ]
    axis = plots.draw_latency([*steps, *new]).axes[0]
    assert line(axis, "distinct")[1][-1] == line(axis, "none")[1][-1] == 2.5
    # What one row is measured by is not what 32 are.
    assert texts(axis) == ["none", "distinct", "none, all bytes once"]
    with pytest.raises(plots.NothingToDraw, match="of ours and of group_swap"):
        plots.draw_throughput([r for r in [*steps, *new] if r["rows"] == 32])


def test_roofline_has_measured_ceilings_and_numbered_points():
    axis, beside = plots.draw_roofline(RECORDS).axes
    assert axis.get_title() == "y += x A B, 4096 -> 4096, rank 16"
    assert texts(axis) == ["reads 4 TB/s, product 780 TFLOP/s", "distinct", "identical"]
    x, y = line(axis, texts(axis)[0])
    # The slanted part is the bandwidth's, the flat one the product's.
    assert y[0] / x[0] == pytest.approx(4.0) and y[1:] == [780, 780]
    assert x[1] == pytest.approx(195)
    assert line(axis, "distinct") == ([10, 10], [pytest.approx(10 / 6), 640 / 6])
    # Both popularities' points coincide.
    assert [text.get_text() for text in axis.texts] == ["1, 2", "3, 4"]
    assert [" ".join(text.get_text().split()) for text in beside.texts] == [
        "1 1 row, distinct 10 MFLOP 1 MB 6.0 us",
        "2 1 row, identical 10 MFLOP 1 MB 6.0 us",
        "3 64 rows, distinct 640 MFLOP 64 MB 6.0 us",
        "4 64 rows, identical 640 MFLOP 64 MB 6.0 us",
    ]


def words_of(axis):
    """Return what is written in and around an axis, ticks that are out of it aside."""
    legend = axis.get_legend()
    yield from (axis.title, *axis.texts, *(legend.get_texts() if legend else ()))
    if axis.axison:
        yield from (axis.xaxis.label, axis.yaxis.label)
        for ticks, view in (
            (axis.xaxis.get_major_ticks(), axis.viewLim.intervalx),
            (axis.yaxis.get_major_ticks(), axis.viewLim.intervaly),
        ):
            yield from (t.label1 for t in ticks if view[0] <= t.get_loc() <= view[1])


def boxes(figure):
    """Return the extents of all that is written in a figure, by what it says."""
    figure.draw_without_rendering()
    titled = [
        figure._suptitle,
        *(word for axis in figure.axes for word in words_of(axis)),
    ]
    return [(w.get_text(), w.get_window_extent()) for w in titled if w.get_text()]


def assert_is_readable(figure):
    written = boxes(figure)
    for (one, box), (other, beside) in itertools.combinations(written, 2):
        assert not box.overlaps(beside), f"{one!r} overlaps {other!r}"
    for one, box in written:
        inside = figure.bbox.containsx(box.x0) and figure.bbox.containsx(box.x1)
        inside &= figure.bbox.containsy(box.y0) and figure.bbox.containsy(box.y1)
        assert inside, f"{one!r} leaves the figure"


def test_roofline_of_what_was_measured_is_readable():
    records = load()
    cells = [record for record in records if record["benchmark"] == "sgmv"]
    where = {name: cells[-1][name] for name in made.WHERE}
    [ceilings] = made.ceiling_records()
    figure = plots.draw_roofline([*cells, ceilings | where])
    assert_is_readable(figure)
    axis, beside = figure.axes
    legend = axis.get_legend().get_window_extent()
    numbers = [text.get_window_extent() for text in axis.texts]
    assert not any(number.overlaps(legend) for number in numbers)
    said = ", ".join(text.get_text() for text in axis.texts).split(", ")
    every = {text.get_text().split()[0] for text in beside.texts}
    # Each point once, and all of them in the list.
    assert len(said) == len(every) >= 17 and set(said) == every
    assert len(axis.texts) > len(every) / 2


@pytest.mark.parametrize("name", ["latency", "adapters", "order", "throughput"])
def test_other_plots_are_readable(name):
    assert_is_readable(plots.PLOTS[name](RECORDS))


def test_adapters():
    step, product = plots.draw_adapters(RECORDS).axes
    assert step.get_title() == "decode step, 7B, 32 rows"
    assert step.get_xscale() == "log" and step.get_ylabel() == "% over no adapter"
    counts, over = line(step, "punica-jax")
    assert counts == [1, 32, 1000] and over[-1] == pytest.approx(100 / 6)
    assert texts(product) == ["punica-jax (segments)", "XLA gather"]
    (axis,) = plots.draw_adapters(ADAPTERS[-6:]).axes
    assert axis.get_ylabel() == "us a product"


@pytest.mark.parametrize("other", [{"rows": 8}, {"width": 512}])
def test_sizes_have_panels_of_their_own(other):
    new = [record | other | {"us": 9.0, "step_ms": 9.0} for record in RECORDS]
    products = [r for r in RECORDS if r["benchmark"] == "adapters_op"]
    figure = plots.draw_adapters([*products, *new])
    size = "8 rows, 4096 wide" if "rows" in other else "32 rows, 512 wide"
    panels = {axis.get_title(): axis for axis in figure.axes}
    assert line(panels[f"one product, {size}"], "XLA gather")[1] == [9.0] * 3
    same = line(panels["one product, 32 rows, 4096 wide"], "XLA gather")
    assert same == ([1, 32, 1000], [5.0] * 3)
    figure = plots.draw_order([*ORDER, *new])
    heights = {
        axis.get_title(): {bar.get_height() for bar in axis.patches}
        for axis in figure.axes
    }
    size = "8 rows, 4096 wide" if "rows" in other else "64 rows, 512 wide"
    assert heights[f"distinct, {size}"] == {9.0} and len(heights) == 4
    assert heights["distinct, 64 rows, 4096 wide"] == {5.0}


def test_order():
    figure = plots.draw_order(RECORDS)
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["uniform, 64 rows, 4096 wide", "distinct, 64 rows, 4096 wide"]
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == ["AABCCC (sorted)", "shuffled", "ABCABC"]
    assert len(figure.axes[0].patches) == 9


def test_what_the_host_bounds_is_not_drawn():
    host = [r | {"launch_us": 4.8 if r["method"] == "gather" else 4.0} for r in ORDER]
    axis = plots.draw_order(host).axes[0]
    assert texts(axis) == ["punica-jax (segments)", "a segment for every row"]
    with pytest.raises(plots.NothingToDraw):
        plots.draw_order([r for r in host if r["method"] == "gather"])
    steps = made.decode_records()
    host = [r | {"launch_ms": 0.95 * r["step_ms"]} for r in steps]
    ours = [r for r in steps if r["method"] == "ours"]
    with pytest.raises(plots.NothingToDraw):
        plots.draw_throughput([*host, *ours])


def test_throughput_is_of_cases_that_both_were_measured_in():
    steps = [
        record
        for record in made.decode_records()
        if record["shape"] == "7B" or record["method"] == "ours"
        if record["method"] != "group_swap" or record["popularity"] != "skewed"
    ]
    figure = plots.draw_throughput(steps)
    assert "Punica's paper: 12x" in figure.get_suptitle()
    one, axis = figure.axes
    assert [one.get_title(), axis.get_title()] == ["7B, 1 rows", "7B, 32 rows"]
    assert texts(axis) == ["one mixed batch", "group and swap"]
    names = ["identical", "uniform", "distinct"]
    assert [label.get_text() for label in axis.get_xticklabels()] == names
    heights = [bar.get_height() for bar in axis.patches]
    assert len(heights) == 6
    assert heights[2] == pytest.approx(32 / 8.0 * 1e3)
    assert heights[5] == pytest.approx(32 / 28.0 * 1e3)
    assert [text.get_text() for text in axis.texts][-1] == "3.5x"
    # What was measured at another commit is not beside it, faster or not.
    newer = {"commit": "new", "tokens_per_s": 1.0}
    later = [r | newer for r in steps if r["method"] == "ours"]
    _, axis = plots.draw_throughput([*steps, *later]).axes
    assert [bar.get_height() for bar in axis.patches] == heights
    # Of two runs the later one counts, wherever else its commit had records before.
    first = {"benchmark": "order", "commit": "new"}
    again = [r | newer for r in steps]
    _, axis = plots.draw_throughput([first, *steps, *again]).axes
    assert {bar.get_height() for bar in axis.patches} == {1.0}
    with pytest.raises(plots.NothingToDraw, match="of ours and of group_swap"):
        eight = [r for r in made.decode_records() if r["shape"] == "8B"]
        seven = [r for r in steps if r["method"] == "group_swap"]
        plots.draw_throughput([*seven, *(r for r in eight if r["method"] == "ours")])


def test_every_source_of_what_is_drawn_is_named():
    old = [record | {"commit": "old"} for record in ORDER]
    new = {"commit": "new", "us": 7.0}
    half = [record | new for record in old[: len(old) // 2]]
    figure = plots.draw_order([*old, *half])
    _, *sources = figure.get_suptitle().splitlines()
    assert [re.findall(r"commit (\w+)", line) for line in sources] == [["new"], ["old"]]
    heights = {bar.get_height() for bar in figure.axes[0].patches}
    assert heights == {7.0}  # the last record of a case counts
    again = plots.draw_order([*old, *ORDER])
    assert "commit old" not in again.get_suptitle()


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_devices_are_never_mixed(tmp_path):
    records = ORDER
    write(tmp_path / "order_h200.jsonl", records)
    others = [record | {"device": "NVIDIA H100"} for record in records]
    write(tmp_path / "order_h100.jsonl", others)
    assert plots.load(tmp_path) == records
    write(tmp_path / "decode_h200.jsonl", others)
    with pytest.raises(ValueError, match=r"one device, got NVIDIA H100 in decode_h200"):
        plots.main(["--results", str(tmp_path)])


def test_files_are_written_and_missing_records_are_said(tmp_path, capsys):
    write(tmp_path / "some_h200.jsonl", ORDER)
    plots.main(["--results", str(tmp_path)])
    assert capsys.readouterr().out.splitlines() == [
        "latency: skipped, no records of decode method backbone, context 512",
        "roofline: skipped, no records of ceilings",
        "adapters: skipped, no records of adapters_step, nor of adapters_op",
        f"order: {tmp_path / 'order.png'}",
        "throughput: skipped, no run of decode has records of ours and of group_swap",
    ]
    assert [file.name for file in tmp_path.glob("*.png")] == ["order.png"]
    picture = imread(tmp_path / "order.png")
    assert picture.shape[0] > 300 and picture.std() > 0.05  # not blank
