import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks import device_time, sgmv, sgmv_rivals
from benchmarks.sgmv_cells import Cell, load_cells
from punica_jax.pallas_kernels.shapes import MODEL_SHAPES

TINY = Cell(
    suite="decode",
    d_in=64,
    d_outs=(32, 16),
    rank=32,
    rows=6,
    popularity="skewed",
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(device_time, "COLD_BYTES", TINY.num_bytes)
    monkeypatch.setattr(device_time, "_WINDOW_S", 1e-4)


def test_cells_are_the_peers():
    cells = load_cells()
    assert len(cells) == len({cell.name for cell in cells}) == 86
    assert {cell.suite for cell in cells} == {"decode", "prefill", "stacked"}
    (cell,) = [c for c in cells if c.name == "4096->4096 r16 64 distinct"]
    assert (cell.peer, cell.peer_us, cell.loop_us) == ("Punica BGMV", 16.4, 601.4)
    # 64 adapters' A and B, x, y read and y written: 17.9 MB.
    assert cell.num_bytes == 2 * (64 * 16 * 8192 + 64 * 3 * 4096)
    assert cell.floor_us == pytest.approx(4.3, abs=0.2)
    (cell,) = [c for c in cells if c.name == "4096->4096 r64 2048 seg8"]
    assert cell.sizes == [256] * 8


def test_cells_are_modules_of_named_shapes():
    modules = {
        pair
        for shape in MODEL_SHAPES.values()
        for pair in (
            (shape.hidden_size, shape.num_heads * shape.head_dim),
            (shape.hidden_size, shape.num_kv_heads * shape.head_dim),
            (shape.hidden_size, shape.intermediate_size),
            (shape.intermediate_size, shape.hidden_size),
        )
    }
    for cell in load_cells():
        assert {(cell.d_in, d_out) for d_out in cell.d_outs} <= modules, cell


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=pytest.mark.slow) if name.startswith("ours") else name
        for name in sgmv.METHODS
    ],
)
def test_methods_agree_with_the_oracle_and_are_timed(method, monkeypatch):
    make = sgmv.inputs_of([TINY])
    program = sgmv.compile_program(TINY, method, jax.eval_shape(make))
    assert isinstance(program, sgmv.Program)
    record = sgmv.run_program(TINY, method, program, make())
    assert record[f"{method}_us"] > 0, record
    if method == "ours":
        times = record["ours_us"] / TINY.floor_us
        assert record["ours_x_floor"] == pytest.approx(times)
    monkeypatch.setattr(sgmv, "_MAX_ERROR", 1e-5)
    record = sgmv.run_program(TINY, method, program, make())
    assert list(record) == [f"{method}_error"]  # a wrong sum is no figure


def test_launches_are_in_order_and_counted():
    def zeros():
        return [jnp.zeros(()) for _ in range(2)]

    operands = [(float(n),) for n in range(5)]
    step = device_time.compile_step(lambda c, n: 10 * c + n, zeros(), operands)
    times, _ = device_time.measure(step, zeros(), operands)
    assert step.num_calls == 5 and 0 < times.launch_s <= times.median_s
    first, second = step(zeros(), operands, ())
    assert (float(first), float(second)) == (24.0, 13.0)


def test_a_rival_waits_for_the_set_before():
    launch = sgmv_rivals.in_turn(lambda y, x, factor: y + factor * x)
    ys = tuple(jnp.full((2, 3), value) for value in (1.0, 10.0, jnp.inf))
    x = jnp.ones((2, 3))
    *others, first = launch(ys[:2], x, 5.0)
    assert (others[0] == 10.0).all() and (first == 6.0).all(), "x stays what it was"
    assert jnp.isnan(launch(ys, x, 5.0)[-1]).all(), "the last one's result is used"


def test_table_and_ratio():
    record = {**sgmv.describe(load_cells()[0]), "ours_us": 3.5, "loop_us": 8.0}
    record["ours_x_floor"] = 35.0
    columns = sgmv.table_of([record, {"cell": "segment_metadata"}]).columns
    cells = {column.header: list(column.cells) for column in columns}
    assert cells["of peer"] == ["0.50", "-"] and cells["x floor"] == ["35.0", "-"]
    # PyTorch's loop, of the peers' run, and ours beside it.
    assert (cells["peer_loop"][0], cells["loop"][0]) == ("9.6", "8.0")
    ratio = functools.partial(sgmv.ratio_to, records=[record])
    assert ratio("peer") == pytest.approx(0.5)
    assert str(ratio("gather")) == "nan"
