"""Completions as they come: pieces of text, many prompts' mixed.

Plain Python; knows sequences and what steps them, nothing of devices.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from punica_jax.request import Completion
from punica_jax.sequence import SequenceState
from punica_jax.transcript import TokenCallback


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one completion.

    Attributes:
      index: its place in the list that `generate` would return; where every `n` is 1,
        the prompt's.
      text: the newest text; empty in the last piece.
      completion: all of it, in its last piece; None before.
    """

    index: int
    text: str
    completion: Completion | None = None


class Steps(Protocol):
    """What steps sequences until they end: `StepLoop`."""

    @property
    def busy(self) -> bool: ...

    def step(self) -> object: ...


class Stream(Iterator[Piece]):
    """The pieces of completions, in the order in which they come.

    The LLM takes no other call from the making of a stream until its last step has run,
    or the stream is closed or dropped.
    """

    def __init__(
        self,
        engine: Steps,
        running: Callable[
            [TokenCallback], AbstractContextManager[Sequence[SequenceState]]
        ],
    ):
        """Begin.

        Args:
          engine: steps the sequences.
          running: makes the sequences, which call what it is given, and hands them to
            the engine; whatever is left of them goes when its context ends.
        """
        self._steps = _steps(engine, running)
        self._fresh = deque(next(self._steps))

    def __next__(self) -> Piece:
        while not self._fresh:
            self._fresh.extend(next(self._steps))
        return self._fresh.popleft()

    def close(self) -> None:
        """End, and free what the completions hold; a second time does nothing."""
        self._fresh.clear()
        self._steps.close()


def _steps(
    engine: Steps,
    running: Callable[[TokenCallback], AbstractContextManager[Sequence[SequenceState]]],
) -> Generator[list[Piece], None, None]:
    """Yield what has come: nothing at the beginning, then each step's pieces."""
    fresh: list[Piece] = []
    with running(lambda index, text: fresh.append(Piece(index, text))) as sequences:
        unfinished = dict(enumerate(sequences))
        while engine.busy:
            yield fresh
            fresh = []
            engine.step()
            for index, sequence in list(unfinished.items()):
                if sequence.finish_reason is not None:
                    del unfinished[index]
                    fresh.append(Piece(index, "", sequence.completion()))
    # After the context: with the last pieces at hand, others may call.
    yield fresh
