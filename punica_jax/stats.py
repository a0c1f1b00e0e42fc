"""What was served, counted: plain numbers that a server can export.

Plain Python; knows numbers and seconds, nothing of where they come from.
"""

import bisect
import dataclasses
from collections.abc import Mapping

from punica_jax.consolidation import Load

# Upper bounds in seconds, from a millisecond to a minute; what is above is counted too.
BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0),
)


@dataclasses.dataclass(slots=True)
class Histogram:
    """Times, counted by size; as Prometheus keeps them, but not cumulative.

    Attributes:
      counts: how many were at most each of `BOUNDS_S` and above the one before; the
        last counts those above all bounds.
      total_s: their sum, seconds.
      max_s: the greatest, seconds.
    """

    counts: list[int] = dataclasses.field(
        default_factory=lambda: [0] * (len(BOUNDS_S) + 1)
    )
    total_s: float = 0.0
    max_s: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count if self.count else 0.0

    def copy(self) -> "Histogram":
        """Return one that does not change with this one."""
        return Histogram(self.counts.copy(), self.total_s, self.max_s)

    def add(self, value_s: float) -> None:
        """Count one."""
        self.counts[bisect.bisect_left(BOUNDS_S, value_s)] += 1
        self.total_s += value_s
        self.max_s = max(self.max_s, value_s)

    def quantile_s(self, fraction: float) -> float:
        """Return a bound that so many of them do not exceed; `max_s` if it is less."""
        needed, seen = fraction * self.count, 0
        for bound, count in zip(BOUNDS_S, self.counts, strict=False):
            seen += count
            if seen >= needed:
                return min(bound, self.max_s)
        return self.max_s


@dataclasses.dataclass(slots=True)
class AdapterStats:
    """What the requests of one adapter, or of the base alone, have had.

    Attributes:
      num_requests: that came; one that asks for n completions counts n times, here
        and in what follows.
      num_finished: of them, those that ended as they should.
      num_failed: those that ended with an error.
      num_cancelled: those that were cancelled.
      num_exported: those that went on elsewhere.
      num_prompt_tokens: of those that have ended.
      num_new_tokens: the same.
      queue_s: from arrival to the first seat; an idle engine gives one while the
        adapter's copy is under way, and the device has the step wait.
      first_token_s: from arrival to the first token.
      token_s: mean time between the tokens of a request, after its first.
      num_reads: times that it was read into host memory.
      num_loads: times that it came to the device.
      num_evictions: times that it left the device for others.
      num_load_failures: times that it could not be read or copied, or was not finite.
      load_s: from when it was wanted until it was copied and rows could use it.
    """

    num_requests: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_exported: int = 0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    queue_s: Histogram = dataclasses.field(default_factory=Histogram)
    first_token_s: Histogram = dataclasses.field(default_factory=Histogram)
    token_s: Histogram = dataclasses.field(default_factory=Histogram)
    num_reads: int = 0
    num_loads: int = 0
    num_evictions: int = 0
    num_load_failures: int = 0
    load_s: Histogram = dataclasses.field(default_factory=Histogram)

    def copy(self) -> "AdapterStats":
        """Return one that does not change with this one."""
        histograms = ("queue_s", "first_token_s", "token_s", "load_s")
        copies = {name: getattr(self, name).copy() for name in histograms}
        return dataclasses.replace(self, **copies)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineGauges:
    """The few numbers of an engine that cost nothing.

    Attributes:
      num_waiting: sequences without a seat.
      num_open_kv_pages: KV pages that whoever sits down next may have.
      has_ended: whether it answers nobody any more.
    """

    num_waiting: int
    num_open_kv_pages: int
    has_ended: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """A request under way, at one moment.

    Attributes:
      num_sequences: of its `n` completions, those that have not ended.
      num_seated: of these, those that have a seat.
      num_kv_pages: that they would need to sit down anew, with nothing shared.
    """

    num_sequences: int
    num_seated: int
    num_kv_pages: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine at one moment.

    Attributes:
      num_waiting: sequences without a seat.
      num_running: sequences with one.
      num_steps: steps launched so far.
      num_step_sequences: those that have rows in the newest step, the batch.
      num_step_rows: its rows, those of prompts included.
      num_preempted: times that a sequence had to give up its seat.
      num_kv_pages: KV pages.
      num_free_kv_pages: those that no sequence uses; some hold prefixes still.
      num_slots: adapters that fit the device at one time.
      num_on_device: adapters there.
      num_rank_pages: module group -> rank pages.
      num_free_rank_pages: module group -> those that no adapter has.
      num_adapters: adapters that requests may name.
      host_adapter_bytes: adapters in host memory.
      nbytes: name -> bytes of its weights, None for one that was never read.
      tiers: name -> "disk", "host" or "device".
      base: of requests without an adapter.
      adapters: name -> of its requests.
    """

    num_waiting: int
    num_running: int
    num_steps: int
    num_step_sequences: int
    num_step_rows: int
    num_preempted: int
    num_kv_pages: int
    num_free_kv_pages: int
    num_slots: int
    num_on_device: int
    num_rank_pages: Mapping[str, int]
    num_free_rank_pages: Mapping[str, int]
    num_adapters: int
    host_adapter_bytes: int
    nbytes: Mapping[str, int | None]
    tiers: Mapping[str, str]
    base: AdapterStats
    adapters: Mapping[str, AdapterStats]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStats:
    """A cluster at one moment.

    Attributes:
      engines: each one's.
      loads: what each has been given; of one that is drained, or has ended, `is_open`
        is False.
      num_moves: requests that went on at another engine so far.
    """

    engines: tuple[EngineStats, ...]
    loads: tuple[Load, ...]
    num_moves: int
