"""What a device did and when, from the profiler; and which source a kernel came from.

Knows profiles and compiled programs' text; nothing of what the kernels are for.
"""

import collections
import dataclasses
import glob
import re
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One kernel on a line of its own; off GPUs, one operation on a thread's."""

    name: str
    line: str
    start_ns: float
    duration_ns: float

    @property
    def end_ns(self) -> float:
        return self.start_ns + self.duration_ns


def record(run: Callable[[], Any]) -> list[Event]:
    """Profile `run()` and return its device's events, in the order of their starts."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    on_gpu = jax.default_backend() == "gpu"
    # Off GPUs the operations are what the host's tracer sees of XLA's own threads.
    options.host_tracer_level = 0 if on_gpu else 2
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # "builtin type event_stats has no __module__ attribute", of JAX's own making.
        warnings.simplefilter("ignore", DeprecationWarning)
        jax.profiler.start_trace(folder, profiler_options=options)
        jax.block_until_ready(run())
        jax.profiler.stop_trace()
        [path] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        profile = jax.profiler.ProfileData.from_file(path)
        events = list(_gpu_events(profile) if on_gpu else _host_events(profile))
    return sorted(events, key=lambda event: event.start_ns)


def kernel_times(run: Callable[[], Any]) -> dict[str, float]:
    """Return the median seconds of each kernel of `run()`, by name.

    Without the gaps between kernels, but each a little longer than it is alone.
    """
    times_s = collections.defaultdict(list)
    for event in record(run):
        times_s[event.name].append(event.duration_ns * 1e-9)
    return {name: statistics.median(times) for name, times in times_s.items()}


def _gpu_events(profile: Any) -> Iterable[Event]:
    for plane in profile.planes:
        for line in plane.lines:
            if "GPU" in plane.name and line.name.startswith("Stream"):
                for number, event in enumerate(line.events):
                    # In a graph a stream's kernels run beside each other, none of
                    # them inside another: each is a line of its own.
                    where = f"{plane.name} {line.name} {number}"
                    yield _event(event, event.name, where)


def _host_events(profile: Any) -> Iterable[Event]:
    for plane in profile.planes:
        for number, line in enumerate(plane.lines):
            for event in line.events:
                operation = dict(event.stats).get("hlo_op")
                if operation is not None:
                    yield _event(event, str(operation), f"{plane.name} {number}")


def _event(event: Any, name: str, line: str) -> Event:
    return Event(
        name=name, line=line, start_ns=event.start_ns, duration_ns=event.duration_ns
    )


def self_times_ns(events: Sequence[Event]) -> list[float]:
    """Return each event's time without the events inside it, on its own line."""
    own = [event.duration_ns for event in events]
    open_by_line: dict[str, list[int]] = {}
    order = sorted(
        range(len(events)), key=lambda i: (events[i].start_ns, -events[i].duration_ns)
    )
    for i in order:
        stack = open_by_line.setdefault(events[i].line, [])
        while stack and events[stack[-1]].end_ns <= events[i].start_ns:
            stack.pop()
        if stack:
            own[stack[-1]] -= events[i].duration_ns
        stack.append(i)
    return own


def busy_ns(events: Sequence[Event]) -> float:
    """Return how long at least one event ran."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start_ns):
        total += max(0.0, event.end_ns - max(end, event.start_ns))
        end = max(end, event.end_ns)
    return total


def kernel_key(name: str) -> str:
    """Return a name as GPU kernels have it: of `fusion.12`, `fusion_12`."""
    return re.sub(r"[.\-]", "_", name)


_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}")
_LOCATION = re.compile(r"^(\d+) \{file_name_id=\d+ function_name_id=(\d+) ")
_NAME = re.compile(r'^(\d+) "(.*)"')
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_OPERANDS = re.compile(r" [\w\-]+\(((?:%[\w.\-]+(?:, )?)+)\)")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_STACK = re.compile(r"stack_frame_id=(\d+)")


def sources(hlo_text: str) -> dict[str, list[tuple[str, ...]]]:
    """Tell which Python functions each operation of a compiled program came from.

    Args:
      hlo_text: what `Compiled.as_text()` returns.

    Returns:
      `kernel_key(operation)` -> for the operation, and all that was fused into it, the
      functions whose code made it, innermost first. An operation that XLA rewrote
      without saying so has its operands' instead.
    """
    stacks = _stacks(hlo_text)
    own: dict[str, tuple[str, ...]] = {}
    members: dict[str, list[str]] = {}
    called: dict[str, list[str]] = {}
    operands: dict[str, list[str]] = {}
    computation = ""
    for line in hlo_text.splitlines():
        if match := _INSTRUCTION.match(line):
            name = match[1]
            members.setdefault(computation, []).append(name)
            if found := _STACK.search(line):
                own[name] = stacks.get(found[1], ())
            if found := _OPERANDS.search(line):
                operands[name] = re.findall(r"%([\w.\-]+)", found[1])
            if " fusion(" in line or " call(" in line:
                called[name] = _CALLED.findall(line)
        elif match := _COMPUTATION.match(line):
            computation = match[1]

    def collect(name: str) -> list[tuple[str, ...]]:
        inner = [m for c in called.get(name, ()) for m in members.get(c, ())]
        mine = [own[name]] if name in own else []
        return mine + [stack for member in inner for stack in collect(member)]

    def of(name: str) -> list[tuple[str, ...]]:
        return collect(name) or [s for o in operands.get(name, ()) for s in collect(o)]

    names = [name for group in members.values() for name in group]
    return {kernel_key(name): of(name) for name in names}


def _stacks(hlo_text: str) -> Mapping[str, tuple[str, ...]]:
    """Read the tables at the program's head: frame -> functions, innermost first."""
    tables: dict[str, dict[str, Any]] = {}
    patterns = {
        "FunctionNames": _NAME,
        "FileLocations": _LOCATION,
        "StackFrames": _FRAME,
    }
    section = ""
    for line in hlo_text.splitlines():
        if line in ("FileNames", *patterns):
            section = line
        elif section in patterns and (match := patterns[section].match(line)):
            tables.setdefault(section, {})[match[1]] = match.groups()[1:]
    functions, locations, frames = (tables.get(name, {}) for name in patterns)
    stacks: dict[str, tuple[str, ...]] = {}
    for frame in frames:
        names, at = [], frame
        while at in frames:
            location, parent = frames[at]
            names.append(functions[locations[location][0]][0])
            # The text numbers parents from 1, 1 being none; frames too, none being 0.
            at = str(int(parent or 1) - 1)
        stacks[frame] = tuple(names)
    return stacks
