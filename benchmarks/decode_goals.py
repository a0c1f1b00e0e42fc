"""What a decode step may cost, what comes before and after it, and whether it does.

Pure functions of records; knows nothing of how they were measured.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from benchmarks import peers
from benchmarks.device_time import PEAK_BYTES_PER_S, is_host_bound
from benchmarks.provenance import Record
from punica_jax.pallas_kernels.shapes import LLAMA_2_7B, LLAMA_3_1_8B

# What is allowed over backbone and adapters' bytes, by rows.
EXTRA_MS = {1: 0.15, 32: 0.20, 64: 0.35, 128: 0.35}
# The step without adapters when the goals were set, by shape and rows. A step is held
# against this one, too: a backbone that got faster since makes no step slower.
FIRST_BACKBONE_MS = {
    (LLAMA_2_7B.name, 1): 4.1,
    (LLAMA_2_7B.name, 32): 6.50,
    (LLAMA_2_7B.name, 64): 8.99,
    (LLAMA_2_7B.name, 128): 14.06,
    (LLAMA_3_1_8B.name, 32): 5.04,
}
# Where a step's cost is judged: shape, rows, popularities.
JUDGED = (
    (LLAMA_2_7B.name, 1, ("identical",)),
    (LLAMA_2_7B.name, 32, ("identical", "distinct")),
    (LLAMA_2_7B.name, 64, ("uniform", "skewed")),
    (LLAMA_2_7B.name, 128, ("uniform", "skewed")),
    (LLAMA_3_1_8B.name, 32, ("identical", "distinct")),
)
# A batch of mixed ranks against one of its least rank, the others' bytes aside.
RANK_SLACK = 1.02
# Host time of a step's launch.
LAUNCH_MS = 1.0
# What choosing tokens may cost of a step of so many rows.
SAMPLING_SHARE = 0.03
SAMPLING_ROWS = 32
# A product's rivals that XLA may compute several calls of in one launch.
_OF_XLA = ("gather", "ragged_dot")
# Asked for beside.
_NOT_CHOOSING = ("logprobs",)
# The batch whose step with as many adapters is to beat vLLM's with none.
HEADLINE_ROWS = 32
# The context of steps, but for the headline's.
CONTEXT = 512
# The backbone's step over its bytes, at rows.
MOST_OVER_FLOOR = 1.15
FLOOR_ROWS = (1, 32)
# A product over the best of others' kernels, in the geometric mean over cells.
MOST_OF_PEER = 0.75
# A product over PyTorch's loop over adapters, where that beats every kernel.
LOOP_SLACK = 1.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is to be reached, what was measured, and the records that say it."""

    what: str
    wanted: str
    measured: str
    met: bool
    records: Sequence[Record]


def judge(record: Record, backbone: Record) -> Record:
    """Return a record with the backbone of its run, what it may cost, who to beat."""
    record = {**record, "backbone_ms": backbone["step_ms"]}
    extra = EXTRA_MS.get(record["rows"])
    if record["method"] == "ours" and extra is not None:
        allowed = backbone["step_ms"] + record["adapters_ms"] + extra
        record |= {"allowed_ms": allowed, "met": record["step_ms"] <= allowed}
    if record["context"] == peers.SPAN:
        peer_ms = peers.step_to_beat_ms(record["shape"], record["rows"])
        if peer_ms is not None:
            record["vllm_none_ms"] = peer_ms
    return record


def judge_ranks(record: Record, least: Record) -> Record:
    """Hold a batch of mixed ranks against the same batch, all of the least rank."""
    allowed = RANK_SLACK * least["step_ms"] + record["pages_ms"] - least["pages_ms"]
    return {
        **record,
        "least_rank_ms": least["step_ms"],
        "rank_allowed_ms": allowed,
        "rank_met": record["step_ms"] <= allowed,
    }


def judge_launch(record: Record) -> Record:
    """Hold the host time of a step's launch against what it may take."""
    met = record["launch_ms"] <= LAUNCH_MS
    return {**record, "goal": f"{LAUNCH_MS:g} ms", "met": met}


def judge_sampling(record: Record, steps: Iterable[Record]) -> Record:
    """Say which share of a 7B step of as many rows choosing tokens takes.

    The step is the last recorded one without adapters at context 512. Its output head
    has the 7B shape's own vocabulary of 32,000; the further bytes of a head as large as
    what was drawn from count as read once, at the floors' rate.

    Args:
      record: of `benchmarks.sampling`.
      steps: records of `benchmarks.decode`, in order of time.

    Returns:
      The record, with `step_ms` and `share` where there is such a step, and `goal` and
      `met` where the goal speaks of it, and the time is the device's.
    """
    step = step_drawn_from(record, steps)
    if step is None:
        return record
    further = record["vocab"] - LLAMA_2_7B.vocab_size
    head_s = 2 * further * LLAMA_2_7B.hidden_size / PEAK_BYTES_PER_S
    step_ms = step["step_ms"] + head_s * 1e3
    share = record["us"] * 1e-3 / step_ms
    judged = {**record, "step_ms": step_ms, "share": share}
    is_of_host = is_host_bound(record["us"], record.get("launch_us", 0.0))
    is_asked = record["rows"] == SAMPLING_ROWS and record["case"] not in _NOT_CHOOSING
    if is_asked and not is_of_host:
        goal = f"{100 * SAMPLING_SHARE:g} %"
        judged |= {"goal": goal, "met": share <= SAMPLING_SHARE}
    return judged


def step_drawn_from(record: Record, steps: Iterable[Record]) -> Record | None:
    """Return the step of which `judge_sampling` takes a share, if there is one."""
    wanted = {"shape": LLAMA_2_7B.name, "rows": record["rows"], "context": CONTEXT}
    wanted |= {"popularity": "none"}
    found = [one for one in steps if wanted.items() <= one.items()]
    return found[-1] if found else None


def goals(
    steps: Sequence[Record], cells: Iterable[Record], mixed: Sequence[Record] = ()
) -> list[Goal]:
    """Judge all goals of steps, and of products; none of what has no record at all.

    Args:
      steps: of `benchmarks.decode`, one for each case.
      cells: of `benchmarks.sgmv`, one for each cell; without `ours_us` ours failed.
      mixed: of `benchmarks.decode`, of mixed ranks, one for each case.
    """
    of_steps: Iterable[Goal] = ()
    if steps:
        of_steps = itertools.chain(
            *(_headline(steps), _over_floor(steps), _allowed(steps), _ranks(mixed))
        )
    return [*of_steps, *_products([cell for cell in cells if cell.get("peer_us")])]


def device_us(cell: Record, method: str) -> float | None:
    """Return what a method took of the device; None if that is not known.

    It is not where the host took longer, nor of XLA's own where several calls did not
    wait for one another: it computes them in one launch.

    Args:
      cell: of `benchmarks.sgmv`.
      method: one of its methods, or `peer` or `peer_loop`, which no host launched.
    """
    us = _timed_us(cell, method)
    if us is None or is_host_bound(us, cell.get(f"{method}_launch_us", 0.0)):
        return None
    return us


def deciding_us(cell: Record, rival: str, ours: str = "ours") -> float | None:
    """Return a rival's time if it says who was faster; None if it does not.

    It does, too, where it is the host's and shorter than ours: the device took no
    longer.
    """
    us = _timed_us(cell, rival)
    is_shorter = us is not None and us < cell.get(f"{ours}_us", math.inf)
    return us if is_shorter else device_us(cell, rival)


def _timed_us(cell: Record, method: str) -> float | None:
    """Return what a method took of device or host; None if calls did not wait."""
    # Older records' rivals did not wait; several adapters' loop is none of one launch.
    is_one_loop = method == "loop" and cell.get("adapters") == 1
    waits = cell.get("in_turn") or not (method in _OF_XLA or is_one_loop)
    return cell.get(f"{method}_us") if waits else None


def _headline(steps: Sequence[Record]) -> Iterator[Goal]:
    for shape in (LLAMA_2_7B.name, LLAMA_3_1_8B.name):
        step = _step_of(steps, shape, HEADLINE_ROWS, "distinct", peers.SPAN)
        beaten_ms = peers.step_to_beat_ms(shape, HEADLINE_ROWS)
        beaten_ms = beaten_ms if step is None else step["vllm_none_ms"]
        yield _judged(
            f"{_case_of(shape, HEADLINE_ROWS, peers.SPAN)}: a step with an adapter for "
            "each row, faster than vLLM's without any",
            f"< {beaten_ms:.2f} ms",
            step,
            "" if step is None else f"{step['step_ms']:.2f} ms",
            step is not None and step["step_ms"] < step["vllm_none_ms"],
        )


def _over_floor(steps: Sequence[Record]) -> Iterator[Goal]:
    for rows in FLOOR_ROWS:
        step = _step_of(steps, LLAMA_2_7B.name, rows, "none")
        over = math.inf if step is None else step["step_ms"] / step["floor_ms"]
        yield _judged(
            f"{_case_of(LLAMA_2_7B.name, rows)}: a step without adapters, over its "
            "floor",
            f"<= {MOST_OVER_FLOOR:g}",
            step,
            f"{over:.2f}",
            over <= MOST_OVER_FLOOR,
        )


def _allowed(steps: Sequence[Record]) -> Iterator[Goal]:
    for shape, rows, popularities in JUDGED:
        for popularity in popularities:
            step = _step_of(steps, shape, rows, popularity)
            first_ms, extra_ms = FIRST_BACKBONE_MS[shape, rows], EXTRA_MS[rows]
            for backbone, allowed_ms in (
                ("one without adapters", step and step["allowed_ms"]),
                (
                    f"{first_ms:.2f} ms without adapters when the goal was set",
                    step and first_ms + step["adapters_ms"] + extra_ms,
                ),
            ):
                yield _judged(
                    f"{_case_of(shape, rows)}, {popularity}: a step, against "
                    f"{backbone}, their bytes and {extra_ms:g} ms",
                    "" if step is None else f"<= {allowed_ms:.2f} ms",
                    step,
                    "" if step is None else f"{step['step_ms']:.2f} ms",
                    step is not None and step["step_ms"] <= allowed_ms,
                )


def _ranks(mixed: Sequence[Record]) -> Iterator[Goal]:
    for step in mixed:
        ranks = ", ".join(map(str, step["ranks"]))
        yield _judged(
            f"{_case_of(step['shape'], step['rows'], step['context'])}, "
            f"{step['popularity']}, ranks {ranks} mixed: a step, against "
            f"{RANK_SLACK:g} times one of the least, and the bytes of the rest",
            f"<= {step['rank_allowed_ms']:.2f} ms",
            step,
            f"{step['step_ms']:.2f} ms",
            step["rank_met"],
        )


def _step_of(
    steps: Sequence[Record],
    shape: str,
    rows: int,
    popularity: str,
    context: int | str = CONTEXT,
) -> Record | None:
    """Return the step of a case that was judged when it was measured."""
    wanted = {"shape": shape, "rows": rows, "popularity": popularity}
    wanted |= {"context": context}
    wanted |= {"method": "backbone" if popularity == "none" else "ours"}
    needed = set()
    if popularity != "none":
        needed = {"vllm_none_ms"} if context == peers.SPAN else {"allowed_ms", "met"}
    found = [s for s in steps if wanted.items() <= s.items() and needed <= s.keys()]
    return found[-1] if found else None


def _case_of(shape: str, rows: int, context: int | str = CONTEXT) -> str:
    contexts = "contexts" if context == peers.SPAN else "context"
    counted = "1 row" if rows == 1 else f"{rows} rows"
    return f"{shape}, {counted}, {contexts} {str(context).replace('..', ' to ')}"


def _judged(
    what: str, wanted: str, step: Record | None, measured: str, met: bool
) -> Goal:
    return Goal(
        what=what,
        wanted=wanted,
        measured="not measured" if step is None else measured,
        met=met,
        records=[] if step is None else [step],
    )


def _products(cells: Sequence[Record]) -> Iterator[Goal]:
    loops = [c for c in cells if c.get("peer_loop_us", math.inf) < c["peer_us"]]
    others = [cell for cell in cells if cell not in loops]
    yield from _in_every_cell("faster than the best existing kernel", others, "peer")
    yield from _in_every_cell(
        "where PyTorch's loop over adapters beats every kernel, at most "
        f"{100 * (LOOP_SLACK - 1):.0f} % slower than that",
        loops,
        "peer_loop",
        LOOP_SLACK,
    )
    if cells:
        ratios = [cell.get("ours_us", math.inf) / cell["peer_us"] for cell in cells]
        mean = statistics.geometric_mean(ratios)
        yield Goal(
            what="one product, over the best existing kernel's, geometric mean",
            wanted=f"<= {MOST_OF_PEER:g}",
            measured=f"{mean:.2f}",
            met=mean <= MOST_OF_PEER,
            records=cells,
        )
    yield from _in_every_cell("faster than XLA gather", cells, "gather")
    yield from _in_every_cell("faster than `ragged_dot`", cells, "ragged_dot")


def _in_every_cell(
    what: str, cells: Iterable[Record], rival: str, slack: float = 0.0
) -> Iterator[Goal]:
    """Judge whether we take less than a rival, or at most `slack` times its time."""
    cells = list(cells)
    known = [cell for cell in cells if deciding_us(cell, rival)]
    pairs = [(cell.get("ours_us", math.inf), cell[f"{rival}_us"]) for cell in known]
    won = [ours for ours, us in pairs if ours < us or ours <= slack * us]
    num_unknown = len(cells) - len(known)
    rest = f", {num_unknown} not measured" if num_unknown else ""
    if cells:
        yield Goal(
            what=f"one product, {what}",
            wanted="every cell",
            measured=f"{len(won)} of {len(known)}{rest}" if known else "not measured",
            met=len(won) == len(cells),
            records=known or cells,
        )
