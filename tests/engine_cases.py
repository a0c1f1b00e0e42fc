"""Engines on the tiny model that share compiled programs, and ways to ask them."""

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import pytest

import punica_jax as pj
from punica_jax import base_model
from punica_jax.batch import Buckets
from punica_jax.runner import Runner
from tests import tiny_checkpoint as tiny

_T = TypeVar("_T")

NUM_SLOTS = 3
PAGE_SIZE = 16
NUM_KV_PAGES = 10  # four sequences cannot grow long together
KV_PAGE_BYTES = 2 * 2 * 2 * PAGE_SIZE * 8 * 4  # K and V, layers, heads, head_dim
RANKS = {"a": 4, "b": 20, "c": 64, "d": 8, "e": 16, "f": 33, "g": 8}
CONFIG = {
    "max_model_len": 96,
    "max_seats": 4,
    "max_step_rows": 32,
    "num_slots": NUM_SLOTS,
    "page_size": PAGE_SIZE,
    "kv_memory": NUM_KV_PAGES * KV_PAGE_BYTES,
    "progress": False,
}
GREEDY = pj.SamplingParams(max_new_tokens=12, ignore_eos=True)
WAIT_S = 60.0


_PROGRAMS = (
    *("_steps_by", "_write_seat"),
    *("_draw", "_logprobs", "_prompt_logprobs"),
)


class QuickRunner(Runner):
    """A runner whose programs are compiled by the first one alone."""

    _first: "QuickRunner | None" = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        QuickRunner._first = first = QuickRunner._first or self
        for name in _PROGRAMS:
            setattr(self, name, getattr(first, name))


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Let what is made inside have such a runner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base_model, "Runner", QuickRunner)
        yield


@contextlib.contextmanager
def own_programs() -> Iterator[None]:
    """Let those that are made inside have none of the programs compiled before."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuickRunner, "_first", None)
        yield


def files(folder: pytest.TempPathFactory) -> Path:
    """Return a folder with `model` and `adapters`, written by who comes first."""
    root = folder.getbasetemp() / "engine"
    if not root.is_dir():
        tiny.write_model(root / "model")
        (root / "adapters").mkdir()
        for seed, (name, rank) in enumerate(RANKS.items(), 1):
            tiny.write_adapter(root / "adapters" / name, rank, seed=seed)
    return root


def make_engine(root: Path, **changed: Any) -> pj.Engine:
    """Make an engine of `CONFIG`; `adapters` and `adapters_dir` go to it."""
    outer = {
        name: changed.pop(name)
        for name in ("adapters", "adapters_dir")
        if name in changed
    }
    if not outer:
        outer["adapters"] = {name: root / "adapters" / name for name in RANKS}
    with quick():
        return pj.Engine(
            root / "model", config=pj.EngineConfig(**CONFIG | changed), **outer
        )


class Alone:
    """What requests get that have an LLM for themselves, which knows no prefix."""

    def __init__(self, root: Path, **changed: Any):
        self._root = root
        sizes = CONFIG | changed
        del sizes["max_step_rows"]
        with quick(), pytest.MonkeyPatch.context() as patch:
            # As many slots as the engine has with its spare one.
            init = functools.partialmethod(base_model.BaseModel.__init__, num_spare=1)
            patch.setattr(base_model.BaseModel, "__init__", init)
            self._llm = pj.LLM(root / "model", **sizes)
        # Not the engine's size of a prefill: its rows do not depend on that. A program
        # of its own, then, compiled before a test counts what is.
        self._llm._loop._buckets = Buckets(4, 40)
        self("hello")

    def __call__(
        self,
        prompt: Any,
        adapter: str | Path | None = None,
        sampling: pj.SamplingParams = GREEDY,
    ) -> list[pj.Completion]:
        """Return its completions; an adapter is a name, or a directory."""
        llm = self._llm
        llm._loop.reset()
        llm._loop.scheduler.max_rows = 32
        name = None if adapter is None else str(adapter)
        if name is not None and name not in llm.adapters:
            if len(llm.adapters) == NUM_SLOTS:
                llm.unload_adapter(next(iter(llm.adapters)))
            llm.load_adapter(name, self._root / "adapters" / name)
        prompts = prompt if isinstance(prompt, str) else [prompt]
        return llm.generate(prompts, name, sampling)

    def tokens(self, *request: Any) -> list[tuple[int, ...]]:
        return [one.token_ids for one in self(*request)]


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end, which must not take long."""
    return asyncio.run(asyncio.wait_for(main, WAIT_S))


async def completions(
    pieces: AsyncIterator[pj.Piece],
    seen: list[pj.Piece] | None = None,
    *,
    is_whole: bool = True,
) -> list[pj.Completion]:
    """Take all pieces; check that they add up to the texts, if they are all."""
    texts: dict[int, str] = {}
    ended: dict[int, pj.Completion] = {}
    async for piece in pieces:
        if seen is not None:
            seen.append(piece)
        assert piece.index not in ended, "nothing comes after the last piece"
        texts[piece.index] = texts.get(piece.index, "") + piece.text
        assert bool(piece.text) == (piece.completion is None)
        if piece.completion is not None:
            ended[piece.index] = piece.completion
    assert texts == {index: ended[index].text for index in ended} or not is_whole
    return [ended[index] for index in sorted(ended)]


def assert_same(
    got: Sequence[pj.Completion], want: Sequence[pj.Completion], what: object = ""
) -> None:
    """Assert that completions are the same, log-probabilities to float32's rounding."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        plain = {
            "logprobs": None,
            "prompt_logprobs": None,
            "cumulative_logprob": None,
        }
        assert replace(one, **plain) == replace(other, **plain), what
        for name in ("logprobs", "prompt_logprobs"):
            mine: Any = getattr(one, name) or ()
            others: Any = getattr(other, name) or ()
            assert len(mine) == len(others)
            for entry, expected in zip(mine, others, strict=True):
                if expected is None:
                    assert entry is None
                    continue
                assert entry.rank == expected.rank and [*entry.top] == [*expected.top]
                values = [expected.logprob, *expected.top.values()]
                assert [entry.logprob, *entry.top.values()] == pytest.approx(
                    values, rel=1e-5, abs=1e-4
                ), what


class Pause:
    """Holds an engine's thread after the first step at whose end something holds."""

    def __init__(self, engine: pj.Engine, holds: Callable[[], bool]):
        self._engine = engine
        self._holds = holds
        self._reached, self._go = threading.Event(), threading.Event()

    def __enter__(self) -> "Pause":
        step = self._engine._loop.step

        def pausing() -> Any:
            over = step()
            if not self._reached.is_set() and self._holds():
                self._reached.set()
                assert self._go.wait(WAIT_S)
            return over

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(self._engine._loop, "step", pausing)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        self.go()

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, WAIT_S), "it never holds"

    def go(self) -> None:
        self._go.set()


def has_tokens(engine: pj.Engine, count: int) -> Callable[[], bool]:
    """Return what tells whether somebody who runs has so many new tokens."""
    return lambda: any(
        len(sequence.new_tokens) >= count for sequence in engine._loop.scheduler.running
    )


@contextlib.contextmanager
def held(engine: pj.Engine) -> Iterator[None]:
    """Hold an engine's thread between two steps: what is asked meanwhile comes next."""
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go.wait(WAIT_S)

    engine._thread.do(wait)
    assert begun.wait(WAIT_S)
    try:
        yield
    finally:
        go.set()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    end_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end_s, "it does not come"
        await asyncio.sleep(0.001)


async def export_amid(
    engine: pj.Engine, pause: Pause
) -> "asyncio.Task[pj.RequestState]":
    """Ask for the request `it` amid a step, and let the step go on."""
    asked = asyncio.create_task(engine.export("it"))
    await until(lambda: bool(engine._thread._commands))
    pause.go()
    return asked


def inside(engine: pj.Engine, look: Callable[[], _T]) -> _T:
    """Return what something in the engine's thread gives, between two steps."""

    async def ask() -> _T:
        return await engine._thread.ask(look)

    return run(ask())


def check_idle(engine: pj.Engine) -> None:
    """Assert that nobody holds anything of an engine."""
    thread, loop, residence = engine._thread, engine._loop, engine._residence

    def is_idle() -> bool:
        loop.scheduler.check_integrity()
        residence.check_integrity()
        leaving = residence.retired or residence.candidates
        return not (
            thread.requests._requests or thread.requests._owners or loop.busy or leaving
        )

    async def wait() -> None:
        end_s = time.monotonic() + WAIT_S
        while not await thread.ask(is_idle):
            assert time.monotonic() < end_s, engine.stats()

    run(wait())
    assert not any(version.num_users for version in residence.values())
    assert loop.pages.num_free == loop.pages.num_pages and not loop.pages.num_uses
    assert not loop._ending and not loop.scheduler.refused and not loop.has_flight
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running) == (0, 0)
    assert stats.num_free_kv_pages == stats.num_kv_pages == NUM_KV_PAGES
