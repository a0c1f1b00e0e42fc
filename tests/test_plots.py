"""Plots say what they show, and draw what the records say."""

import json
import re

import pytest
from matplotlib.image import imread

from benchmarks import plots
from tests import benchmark_records as made

RECORDS = [
    *made.decode_records(),
    *made.sgmv_records(),
    *made.adapters_records(),
    *made.order_records(),
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
    assert texts(axis)[-1] == "all bytes once, most adapters"


def test_roofline_has_measured_ceilings_and_labelled_points():
    (axis,) = plots.draw_roofline(RECORDS).axes
    assert axis.get_title() == "y += x A B, 4096 -> 4096, rank 16"
    assert texts(axis) == ["copy 4 TB/s, product 780 TFLOP/s", "distinct", "identical"]
    x, y = line(axis, texts(axis)[0])
    # The slanted part is the bandwidth's, the flat one the product's.
    assert y[0] / x[0] == pytest.approx(4.0) and y[1:] == [780, 780]
    assert x[1] == pytest.approx(195)
    assert line(axis, "distinct") == ([10, 10], [pytest.approx(10 / 6), 640 / 6])
    notes = {text.get_text() for text in axis.texts}
    assert "64 distinct: 640 MFLOP, 64 MB" in notes and len(notes) == 4


def test_adapters():
    step, product = plots.draw_adapters(RECORDS).axes
    assert step.get_title() == "decode step, 32 rows"
    assert step.get_xscale() == "log"
    counts, over = line(step, "7B")
    assert counts == [1, 32, 1000] and over[-1] == pytest.approx(100 / 6)
    assert texts(product) == ["XLA gather", "punica-jax (segments)"]
    (axis,) = plots.draw_adapters(made.adapters_records()[-6:]).axes
    assert axis.get_ylabel() == "us a product"


def test_order():
    figure = plots.draw_order(RECORDS)
    assert [axis.get_title() for axis in figure.axes] == ["uniform", "distinct"]
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == ["AABCCC (sorted)", "shuffled", "ABCABC"]
    assert len(figure.axes[0].patches) == 9


def test_throughput():
    axis = plots.draw_throughput(RECORDS).axes[1]
    assert axis.get_title() == "7B, 32 rows"
    assert texts(axis) == ["one mixed batch", "group by adapter and swap"]
    heights = [bar.get_height() for bar in axis.patches]
    assert heights[3] == pytest.approx(32 / 8.0 * 1e3)
    assert heights[7] == pytest.approx(32 / 28.0 * 1e3)


def test_every_source_of_what_is_drawn_is_named():
    old = [record | {"commit": "old"} for record in made.order_records()]
    new = {"commit": "new", "us": 7.0}
    half = [record | new for record in old[: len(old) // 2]]
    figure = plots.draw_order([*old, *half])
    _, *sources = figure.get_suptitle().splitlines()
    assert [re.findall(r"commit (\w+)", line) for line in sources] == [["new"], ["old"]]
    heights = {bar.get_height() for bar in figure.axes[0].patches}
    assert heights == {7.0}  # the last record of a case counts
    again = plots.draw_order([*old, *made.order_records()])
    assert "commit old" not in again.get_suptitle()


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_devices_are_never_mixed(tmp_path):
    records = made.order_records()
    write(tmp_path / "order_h200.jsonl", records)
    others = [record | {"device": "NVIDIA H100"} for record in records]
    write(tmp_path / "order_h100.jsonl", others)
    assert plots.load(tmp_path) == records
    write(tmp_path / "decode_h200.jsonl", others)
    with pytest.raises(ValueError, match=r"one device, got NVIDIA H100 in decode_h200"):
        plots.main(["--results", str(tmp_path)])


def test_files_are_written_and_missing_records_are_said(tmp_path, capsys):
    write(tmp_path / "some_h200.jsonl", made.order_records())
    plots.main(["--results", str(tmp_path)])
    assert capsys.readouterr().out.splitlines() == [
        "latency: skipped, no records of decode context 512",
        "roofline: skipped, no records of ceilings",
        "adapters: skipped, no records of adapters_step, nor of adapters_op",
        f"order: {tmp_path / 'order.png'}",
        "throughput: skipped, no records of decode method ours, context 512",
    ]
    assert [file.name for file in tmp_path.glob("*.png")] == ["order.png"]
    picture = imread(tmp_path / "order.png")
    assert picture.shape[0] > 300 and picture.std() > 0.05  # not blank
