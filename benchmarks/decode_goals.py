"""What a decode step may cost, what comes before and after it, and whether it does.

Pure functions of records; knows nothing of how they were measured.
"""

from collections.abc import Iterable

from benchmarks import peers
from benchmarks.device_time import PEAK_BYTES_PER_S
from benchmarks.provenance import Record
from punica_jax.pallas_kernels.shapes import LLAMA_2_7B

# What is allowed over backbone and adapters' bytes, by rows.
EXTRA_MS = {1: 0.15, 32: 0.20, 64: 0.35, 128: 0.35}
# A batch of mixed ranks against one of its least rank, the others' bytes aside.
RANK_SLACK = 1.02
# Host time of a step's launch.
LAUNCH_MS = 1.0
# What choosing tokens may cost of a step of so many rows.
SAMPLING_SHARE = 0.03
SAMPLING_ROWS = 32
# Asked for beside.
_NOT_CHOOSING = ("logprobs",)


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
    what was drawn from count as read once, at the copy rate.

    Args:
      record: of `benchmarks.sampling`.
      steps: records of `benchmarks.decode`, in order of time.

    Returns:
      The record, with `step_ms` and `share` where there is such a step, and `goal` and
      `met` where the goal speaks of it.
    """
    wanted = {"shape": LLAMA_2_7B.name, "rows": record["rows"], "context": 512}
    wanted |= {"popularity": "none"}
    found = [one for one in steps if wanted.items() <= one.items()]
    if not found:
        return record
    further = record["vocab"] - LLAMA_2_7B.vocab_size
    head_s = 2 * further * LLAMA_2_7B.hidden_size / PEAK_BYTES_PER_S
    step_ms = found[-1]["step_ms"] + head_s * 1e3
    share = record["us"] * 1e-3 / step_ms
    judged = {**record, "step_ms": step_ms, "share": share}
    if record["rows"] == SAMPLING_ROWS and record["case"] not in _NOT_CHOOSING:
        goal = f"{100 * SAMPLING_SHARE:g} %"
        judged |= {"goal": goal, "met": share <= SAMPLING_SHARE}
    return judged
