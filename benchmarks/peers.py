"""What others' engines were measured at: quoted, with source and date.

Knows the JSON files beside this one; nothing of our own figures.
"""

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
KERNELS = "peers_h200.json"
END_TO_END = "peers_end_to_end_h200.json"
WHOLE_RUNS = "peers_serving_h200.json"
# The contexts over which vLLM's steps are a mean.
SPAN = "512..640"


def load(name: str) -> list[dict[str, Any]]:
    """Return a file's rows as dictionaries."""
    peers = json.loads((_FOLDER / name).read_text())
    return [dict(zip(peers["columns"], row, strict=True)) for row in peers["rows"]]


def source(name: str) -> str:
    """Say who measured what, and when."""
    peers = json.loads((_FOLDER / name).read_text())
    return f"{peers['source']}, {peers['date']}"


def step_to_beat_ms(shape: str, rows: int) -> float | None:
    """Return vLLM's mean step without any adapter over contexts 512 to 640."""
    for row in load(END_TO_END):
        if row["engine"].startswith("vLLM") and row["shape"] == shape:
            if row["rows"] == rows:
                return row["none_ms"]
    return None
