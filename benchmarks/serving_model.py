"""A random model behind an engine's thread, and what its steps did.

Requests are numbers of tokens, asked for by clients of one event loop, as those of
`Engine` are. Knows nothing of what the figures should be.
"""

import asyncio
import collections
import dataclasses
import itertools
import operator
import queue
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers

from benchmarks.device_time import PEAK_BYTES_PER_S
from benchmarks.serving_adapters import RANK
from benchmarks.serving_trace import Request
from punica_jax.bench_model import BenchModel
from punica_jax.claims import Adapters
from punica_jax.engine_request import EngineRequest
from punica_jax.engine_thread import EngineThread
from punica_jax.loop import StepLoop
from punica_jax.policies import FirstComeFirstServed, Policy
from punica_jax.prompts import Prompts
from punica_jax.request import SamplingParams
from punica_jax.residence import AdapterResidence
from punica_jax.runner import Launched, Output, Runner
from punica_jax.sequence import DEFAULT_TERMS
from punica_jax.sizes import Sizes
from punica_jax.stream import Piece
from punica_jax.tokenizer import Tokenizer

_MAX_WAITING = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that was collected.

    Attributes:
      end_s: when; by `time.monotonic`.
      waited_s: how long the host waited for it.
      was_ready: whether the device had ended before the host asked: it may have had
        nothing to do since then.
      decodes: whether every sequence had one row.
      num_seqs: sequences.
      num_new: tokens that came of it.
      kv_tokens: tokens of the sequences, whose keys and values it read.
      num_adapters: different adapters of its rows.
    """

    end_s: float
    waited_s: float
    was_ready: bool
    decodes: bool
    num_seqs: int
    num_new: int
    kv_tokens: int
    num_adapters: int


class WatchedRunner(Runner):
    """A runner that notes what its steps were and when they ended."""

    def __init__(self, *args: Any, **options: Any):
        self.watch()
        super().__init__(*args, **options)

    def watch(self) -> None:
        """Begin anew."""
        self.steps: list[Step] = []
        self._launched: collections.deque[dict[str, Any]] = collections.deque()

    def launch(self, batch: Any, wanted: Any = None, feed: Any = None) -> Launched:
        launched = super().launch(batch, wanted, feed)
        # A few microseconds of small arrays; the device is at work by now.
        slots, kv_lens = np.asarray(batch.slots), np.asarray(batch.seqs.kv_lens)
        self._launched.append(
            {
                "decodes": batch.bucket.is_decode,
                "num_seqs": int(np.count_nonzero(kv_lens)),
                "num_new": 0 if feed is None else int((feed.seats >= 0).sum()),
                "kv_tokens": int(kv_lens.sum()),
                "num_adapters": len(set(slots.tolist()) - {-1}),
            }
        )
        return launched

    def collect(self, launched: Launched) -> Output:
        tokens: Any = launched.tokens  # JAX's stubs lack `is_ready`
        was_ready = tokens.is_ready()
        start = time.monotonic()
        output = super().collect(launched)
        end = time.monotonic()
        self.steps.append(
            Step(
                end_s=end,
                waited_s=end - start,
                was_ready=was_ready,
                **self._launched.popleft(),
            )
        )
        return output


def summary(bench: BenchModel, steps: Sequence[Step]) -> dict[str, Any]:
    """Say what steps did, one after the other; the first only marks the beginning.

    The device is known to be busy while a step takes that had not ended when the host
    came to wait for it: the next one had been launched by then.
    """
    times = [
        (step, step.end_s - before.end_s) for before, step in itertools.pairwise(steps)
    ]
    total_s = sum(spent for _, spent in times)
    decode = [(step, spent) for step, spent in times if step.decodes]
    floors = [floor_s(bench, step) for step, _ in decode]
    decode_s = sum(spent for _, spent in decode)
    idle_s = sum(spent for step, spent in times if step.was_ready)
    waited_s = sum(step.waited_s for step, _ in times)
    return {
        "seconds": total_s,
        "steps": len(times),
        "tokens_per_s": sum(step.num_new for step, _ in times) / total_s,
        "seqs_per_step": statistics.mean(step.num_seqs for step, _ in times),
        "adapters_per_step": statistics.mean(step.num_adapters for step, _ in times),
        "decode_ms": statistics.median(s for _, s in decode) * 1e3 if decode else None,
        "floor_ms": statistics.mean(floors) * 1e3 if decode else None,
        "roofline": sum(floors) / decode_s if decode else None,
        "longest_step_ms": max(spent for _, spent in times) * 1e3,
        "busy": 1 - idle_s / total_s,
        "waiting": waited_s / total_s,
        "host_ms": (total_s - waited_s) / len(times) * 1e3,
    }


def middle(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the run of the middle time, with how many there are, and the extremes."""
    order = sorted(runs, key=operator.itemgetter("seconds"))
    firsts = [run["all_first_ms"] for run in runs]
    return order[len(order) // 2] | {
        "runs": len(runs),
        "low_s": order[0]["seconds"],
        "high_s": order[-1]["seconds"],
        "low_first_ms": min(firsts),
        "high_first_ms": max(firsts),
    }


def floor_s(bench: BenchModel, step: Step) -> float:
    """Return the time in which a step's bytes can be read once, seconds."""
    num_bytes = bench.backbone_bytes(1, step.kv_tokens)
    num_bytes += bench.adapter_bytes([RANK] * step.num_adapters)
    return num_bytes / PEAK_BYTES_PER_S


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A request of which something has come.

    Attributes:
      request: what was asked for.
      tier: where its adapter was then; None without an adapter that can be elsewhere.
      asked_s, seated_s, first_s: when it was asked for, had its adapter and a seat in a
        step, and its client got its first piece.
    """

    request: Request
    tier: str | None
    asked_s: float
    seated_s: float
    first_s: float


class Server:
    """What an `Engine` is without files: a loop, its adapters, and a thread."""

    def __init__(
        self,
        bench: BenchModel,
        sizes: Sizes,
        residence: AdapterResidence,
        *,
        adapters: Adapters | None = None,
        policy: Callable[[], Policy] = FirstComeFirstServed,
        awake: "queue.SimpleQueue[None] | None" = None,
    ):
        """Start to serve.

        Args:
          bench: its runner is a `WatchedRunner`.
          sizes: what the runner was made with.
          residence: knows the adapters that requests name.
          adapters: who gives them their slots, if not the residence.
          policy: makes the queue.
          awake: what the residence wakes.
        """
        assert isinstance(bench.runner, WatchedRunner)
        bench.runner.watch()
        self._bench, self._residence = bench, residence
        self._are_loaded = adapters is None
        self._runner = bench.runner
        self._prompts = Prompts(
            Tokenizer(word_tokenizer(bench.config.vocab_size)),
            residence.__getitem__,
            bench.config.vocab_size,
            sizes.max_model_len,
            sizes.page_size,
        )
        self.loop = StepLoop(bench.runner, sizes, adapters or residence, policy)
        self.thread = EngineThread(
            self.loop, residence, _MAX_WAITING, awake or queue.SimpleQueue()
        )
        self.answers: list[Answer] = []  # in the order of their first pieces
        self.thread.start()

    @property
    def steps(self) -> list[Step]:
        """Those that were collected."""
        return self._runner.steps

    async def answer(self, request: Request) -> Answer:
        """Answer one request, whole; what it waited for is among `answers` sooner."""
        asked_s, answer = time.monotonic(), None
        fresh: list[Piece | Exception] = []
        sampling = SamplingParams(max_new_tokens=request.num_new, ignore_eos=True)
        [sequence] = await self._prompts.sequences_of_one(
            request.prompt(self._bench.config.vocab_size),
            request.adapter,
            sampling,
            lambda index, text: fresh.append(Piece(index, text)),
            default=sampling,
        )
        name = f"request {request.number}"
        asked = EngineRequest(name, [sequence], sampling, DEFAULT_TERMS, fresh)
        tier = None
        if request.adapter is not None and self._are_loaded:
            tier = self._residence[request.adapter].tier
        async for piece in self.thread.answers(asked):
            if answer is None:
                answer = Answer(
                    request=request,
                    tier=tier,
                    asked_s=asked_s,
                    seated_s=sequence.seated_s or asked_s,
                    first_s=time.monotonic(),
                )
                self.answers.append(answer)
            if piece.completion is not None:
                assert len(piece.completion.token_ids) == request.num_new, name
        assert answer is not None
        return answer

    async def serve(
        self,
        requests: Iterator[Request],
        num_clients: int,
        until: Coroutine[Any, Any, None] | None = None,
    ) -> None:
        """Have clients ask for one request after the other, then end.

        Args:
          requests: whoever is free takes the next one.
          num_clients: requests in flight at a time.
          until: when to leave all that is in flight; None is when all is answered.
        """

        async def ask() -> None:
            for request in requests:
                await self.answer(request)

        clients = [asyncio.create_task(ask()) for _ in range(num_clients)]
        try:
            if until is None:
                await asyncio.gather(*clients)
            else:
                end = asyncio.create_task(until)
                tasks = [end, *clients]
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                assert end in done, "there were too few requests"
        finally:
            for client in clients:
                client.cancel()
            self.thread.close()
            await asyncio.gather(*clients, return_exceptions=True)


def word_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Every token is a word of its own."""
    words = {f"{number} ": number for number in range(vocab_size)}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "0 "))
