"""Device time of `y += x A B`: `python -m benchmarks.sgmv [--quick] [--out FILE]`.

Every launch reads other pages, rows and outputs than those before it, so that caches
are cold; launches run one after the other in one CUDA graph, gaps included; a figure is
a median (see `device_time`). A figure counts only if the sums agree with a float32
oracle. Peers' figures come from `peers_h200.json`.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from rich.table import Table

from benchmarks import peers, sgmv_rivals
from benchmarks.decode_goals import deciding_us
from benchmarks.device_time import (
    PEAK_BYTES_PER_S,
    Step,
    compile_step,
    measure,
    num_sets,
)
from benchmarks.provenance import Log
from benchmarks.sgmv_cells import (
    NUM_SLOTS,
    Cell,
    Inputs,
    load_cells,
    make_inputs,
    page_table_of,
    pool_of,
    relative_error,
    slots_of,
)
from benchmarks.timeline import kernel_times
from punica_jax.bench import gather_lora
from punica_jax.pallas_kernels import (
    MAX_PROJECT_ROWS,
    LoraPool,
    Segments,
    _fused,
    _pair,
    _row_expand,
    _shrink,
    resolve,
    segment_metadata,
)

Record = dict[str, Any]

# bfloat16 outputs: rounding alone is 0.3 %.
_MAX_ERROR = 1e-2
OURS: tuple[str, ...] = ("ours", "ours_rows")
METADATA_ROWS = (32, 128, 1024)
_QUICK = (
    "4096->4096 r16 1 distinct",
    "4096->4096 r16 64 distinct",
    "4096->4096 r16 64 identical",
    "4096->4096 r64 64 distinct",
    "11008->4096 r16 64 distinct",
    "4096->4096 r16 512 seg8",
    "4096->4096+4096+4096 r16 64 distinct",
)


def _interprets() -> bool:
    return resolve(None) != "pallas_triton"


def launch_ours(y, rows, page_table, x, pool: LoraPool, segments: Segments) -> Array:
    """Run what `lora` launches on one set's rows of all sets' `x` and `y`."""
    pool, segments = _of_set(rows, page_table, pool, segments)
    return _pair.shrink_and_expand(y, x, pool, segments, interpret=_interprets())


def launch_ours_rows(y, rows, page_table, x, pool: LoraPool, segments: Segments):
    """Do so with the expand that a decode step of so few rows runs.

    Every set has a page table of its own, so each row's pages are looked up for every
    launch; a step does it once.
    """
    pool, segments = _of_set(rows, page_table, pool, segments)
    v = _shrink.shrink(x, pool, segments, interpret=_interprets())
    shrunk = _fused.Shrunk(v, pool, segments)
    return _row_expand.expand(y, shrunk, interpret=_interprets())


def _of_set(rows, page_table, pool: LoraPool, segments: Segments):
    pool = dataclasses.replace(pool, page_table=page_table)
    return pool, dataclasses.replace(segments, rows=rows)


def our_problem(cell: Cell, inputs: Inputs, num_sets: int) -> sgmv_rivals.Problem:
    """Lay out several rounds over the sets, as many as a step's dispatch needs.

    No more than 8: every round rounds y once more, and the oracle does not.
    """
    segments = segment_metadata(jnp.asarray(slots_of(cell)), num_slots=NUM_SLOTS)
    num_rounds = min(8, math.ceil(96 / num_sets))
    operands = [
        (segments.rows + n * cell.rows, jnp.asarray(page_table_of(cell, n)))
        for n in list(range(num_sets)) * num_rounds
    ]
    shared = inputs.x, pool_of(cell, inputs), segments
    return [jnp.copy(inputs.y)], operands, shared


# name -> how its arrays are laid out, and its launch but for the widths.
METHODS: dict[str, tuple[Callable[..., sgmv_rivals.Problem], sgmv_rivals.Launch]] = {
    "ours": (our_problem, launch_ours),
    "ours_rows": (our_problem, launch_ours_rows),
    "gather": (sgmv_rivals.gather_problem, sgmv_rivals.in_turn(gather_lora)),
    "ragged_dot": (
        sgmv_rivals.ragged_dot_problem,
        sgmv_rivals.in_turn(sgmv_rivals.launch_ragged_dot),
    ),
    "loop": (
        sgmv_rivals.loop_problem,
        sgmv_rivals.in_turn(sgmv_rivals.launch_loop),
    ),
}
# Those of others' run: their best kernel, and PyTorch's loop over adapters.
_RIVALS = ("peer", "peer_loop", *(name for name in METHODS if name not in OURS))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One method in one cell, compiled: `build` lays out the inputs for `step`."""

    build: Callable[[Inputs], sgmv_rivals.Problem]
    step: Step


def inputs_of(cells: Iterable[Cell]) -> Callable[[], Inputs]:
    """Return what makes the inputs of one family's cells."""
    cells = list(cells)
    return functools.partial(
        make_inputs,
        cells[0],
        num_adapters=max(
            num_sets(cell.num_bytes) * cell.num_adapters for cell in cells
        ),
        num_rows=max(num_sets(cell.num_bytes) * cell.rows for cell in cells),
    )


def compile_program(cell: Cell, method: str, inputs: Inputs) -> Program | Exception:
    """Compile from the inputs' shapes; what the compiler refuses is returned."""
    lay_out, launch = METHODS[method]
    if method not in OURS:
        launch = functools.partial(launch, d_outs=cell.d_outs)
    sets = num_sets(cell.num_bytes)
    build = jax.jit(functools.partial(lay_out, cell, num_sets=sets))
    problem = jax.eval_shape(build, inputs)
    try:
        step = compile_step(launch, *problem)
        return Program(build=build.lower(inputs).compile(), step=step)
    except jax.errors.JaxRuntimeError as error:
        return error


def run_program(cell: Cell, method: str, program: Program, inputs: Inputs) -> Record:
    """Check the sums, then time; returns the record's fields."""
    carries, operands, shared = program.build(inputs)
    times = len(operands) // num_sets(cell.num_bytes)
    carries = program.step(carries, operands, shared)
    error = relative_error(
        cell, inputs, jax.tree.leaves(carries)[0][: cell.rows], times
    )
    if not error < _MAX_ERROR:
        return {f"{method}_error": error}
    timed, carries = measure(program.step, carries, operands, shared)
    record: Record = timed.fields(f"{method}_", floor_us=cell.floor_us)
    if method == "ours":
        kernels = kernel_times(lambda: program.step(carries, operands, shared))
        for name in {"shrink", "expand"} & {k.removeprefix("lora_") for k in kernels}:
            record[f"{name}_us"] = kernels[f"lora_{name}"] * 1e6
        record["error"] = error
    return record


def run_cells(cells: list[Cell], methods: list[str], say: Callable[[str], None]):
    """Yield each cell's record; cells of one family share their inputs."""

    def methods_of(cell: Cell) -> list[str]:
        few = cell.rows <= MAX_PROJECT_ROWS
        return [method for method in methods if few or method != "ours_rows"]

    for _, family in itertools.groupby(cells, lambda cell: cell.family):
        family = list(family)
        make = inputs_of(family)
        shapes = jax.eval_shape(make)
        jobs = [(cell, method) for cell in family for method in methods_of(cell)]
        say(f"compiling {len(jobs)} programs: {family[0].name} ...")
        with ThreadPoolExecutor(16) as pool:
            inputs_job = pool.submit(jax.jit(make))
            compile_job = functools.partial(compile_program, inputs=shapes)
            programs = dict(
                zip(jobs, pool.map(compile_job, *zip(*jobs, strict=True)), strict=True)
            )
            inputs = inputs_job.result()
        for cell in family:
            record: Record = describe(cell)
            for method in methods_of(cell):
                program = programs.pop((cell, method))
                if isinstance(program, Exception):
                    record[f"{method}_error"] = str(program)[:200]
                else:
                    record |= run_program(cell, method, program, inputs)
            yield record


def describe(cell: Cell) -> Record:
    return {
        "cell": cell.name,
        "suite": cell.suite,
        "d_in": cell.d_in,
        "d_outs": list(cell.d_outs),
        "rank": cell.rank,
        "rows": cell.rows,
        "popularity": cell.popularity,
        "adapters": cell.num_adapters,
        "bytes": cell.num_bytes,
        "flops": cell.num_flops,
        "floor_us": cell.floor_us,
        "in_turn": True,  # older records' rivals did not wait for the set before
        "peer": cell.peer,
        "peer_us": cell.peer_us,
        "peer_loop_us": cell.loop_us,
    }


def run_metadata() -> Iterable[Record]:
    """Time `segment_metadata`, kernel and XLA's form, each call on slots of its own."""
    for rows in METADATA_ROWS:
        record: Record = {"cell": f"segment_metadata {rows}", "suite": "metadata"}
        rng = np.random.default_rng(0)
        slots = rng.integers(0, NUM_SLOTS, (32, rows), np.int32)
        operands = [(jnp.asarray(own),) for own in slots]
        for method in ("ours", "xla"):
            group = functools.partial(
                segment_metadata,
                num_slots=NUM_SLOTS,
                implementation=None if method == "ours" else "xla",
            )

            def launch(made, slots, group=group):
                # None of a batch without idle rows is below zero: every call waits for
                # all that the one before it has computed. One carry, for arrays cost
                # the host more than a call takes.
                first = sum(leaf[0, :1] for leaf in jax.tree.leaves(made))
                return group(slots + jnp.minimum(first, 0))

            carries = [group(*operands[-1])]
            arrays = jax.tree.leaves((operands[0], carries[0]))
            record["bytes"] = sum(array.nbytes for array in arrays)
            floor_us = record["bytes"] / PEAK_BYTES_PER_S * 1e6
            record["floor_us"] = floor_us
            step = compile_step(launch, carries, operands)
            timed, _ = measure(step, carries, operands)
            record |= timed.fields(f"{method}_", floor_us=floor_us)
        yield record


def table_of(records: Iterable[Record]) -> Table:
    table = Table(caption=f"us; peers: {peers.source(peers.KERNELS)}")
    table.add_column("cell")
    timed = (*OURS, "shrink", "expand", "floor")
    for column in (*timed, "x floor", "best peer", "of peer", *_RIVALS[1:]):
        table.add_column(column, justify="right")
    for record in records:
        us = {name: record.get(f"{name}_us", math.nan) for name in (*timed, *_RIVALS)}
        cells = [f"{us[name]:.1f}" for name in timed]
        cells.append(f"{record.get('ours_x_floor', math.nan):.1f}")
        cells.append(f"{us['peer']:.1f} {record.get('peer', '')}")
        cells.append(f"{us['ours'] / us['peer']:.2f}")
        cells += [f"{us[name]:.1f}" for name in _RIVALS[1:]]
        table.add_row(record["cell"], *(cell.replace("nan", "-") for cell in cells))
    return table


def ratio_to(name: str, records: Iterable[Record]) -> float:
    """Return the geometric mean of our figures over those of `name`."""
    pairs = [(r.get("ours_us"), deciding_us(r, name)) for r in records]
    ratios = [ours / theirs for ours, theirs in pairs if ours and theirs]
    return statistics.geometric_mean(ratios) if ratios else math.nan


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few cells, no rivals")
    parser.add_argument("--cells", help="a regular expression of their names")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="all by default")
    Log.add_options(parser)
    args = parser.parse_args(words)
    cells = [cell for cell in load_cells() if not args.quick or cell.name in _QUICK]
    cells = [cell for cell in cells if re.search(args.cells or "", cell.name)]
    cells.sort(key=lambda cell: (len(cell.d_outs), cell.family))
    methods = args.methods or (list(OURS) if args.quick else list(METHODS))
    console = Console(width=150)
    log = Log(args)
    metadata = run_metadata() if "ours" in methods else ()
    for record in itertools.chain(run_cells(cells, methods, console.print), metadata):
        log.add({"benchmark": "sgmv", **record})
    console.print(table_of(log.records))
    for name in _RIVALS:
        ratio = ratio_to(name, log.records)
        console.print(f"geometric mean, ours / {name}: {ratio:.2f}")


if __name__ == "__main__":
    main()
