"""Where a figure comes from: device, versions, commit, date; its file.

Knows nothing of what was measured.
"""

import argparse
import datetime
import json
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Tables and plots show one device; the files of others may lie beside its own.
FILES = "*_h200.jsonl"
# The fields that say it; records of one run agree in all of them.
FIELDS = ("device", "jax", "jaxlib", "commit", "date")

Record = dict[str, Any]


def load(folder: Path = RESULTS) -> list[Record]:
    """Return the records of the H200's files.

    Raises:
      ValueError: they are of several devices.
    """
    paths = sorted(folder.glob(FILES))
    found = {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in paths
    }
    devices = {
        record["device"]: name for name, records in found.items() for record in records
    }
    if len(devices) > 1:
        named = ", ".join(f"{device} in {name}" for device, name in devices.items())
        raise ValueError(
            f"records of {FILES} must be of one device, got {named}; move the others "
            "to a file of their own"
        )
    return [record for records in found.values() for record in records]


def source(records: Iterable[Record]) -> str:
    """Say where records were measured."""
    found = {
        f"{one['device']}, JAX {one['jax']}, commit {one['commit']}, {one['date']}"
        for one in records
    }
    return "; ".join(sorted(found))


def commit_of(folder: Path = ROOT) -> str:
    """Return the short commit of a checkout, `+` behind it if files differ from it."""

    def git(*words: str) -> str:
        call = ["git", "-C", str(folder), *words]
        done = subprocess.run(call, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Log:
    """Prints records as JSON lines, appends them to a file, and keeps them."""

    def __init__(self, args: argparse.Namespace):
        self.records: list[Record] = []
        self._out: Path | None = args.out
        values = (
            jax.devices()[0].device_kind,
            jax.__version__,
            version("jaxlib"),
            args.commit or commit_of(),
            datetime.date.today().isoformat(),
        )
        self._where = dict(zip(FIELDS, values, strict=True))

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--out", type=Path, help="append JSON lines to this file")
        parser.add_argument("--commit", help="what is measured; git's HEAD by default")

    def add(self, record: Mapping[str, Any]) -> None:
        line = json.dumps({**record, **self._where})
        self.records.append(json.loads(line))
        print(line, flush=True)
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            with self._out.open("a") as file:
                print(line, file=file)
