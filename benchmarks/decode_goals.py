"""What a decode step may cost, and whether it does.

Pure functions of records; knows nothing of how they were measured.
"""

from typing import Any

from benchmarks import peers

Record = dict[str, Any]

# What is allowed over backbone and adapters' bytes, by rows.
EXTRA_MS = {1: 0.15, 32: 0.20, 64: 0.35, 128: 0.35}
# A batch of mixed ranks against one of its least rank, the others' bytes aside.
RANK_SLACK = 1.02


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
