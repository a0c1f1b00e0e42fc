"""Completions as they come: pieces of text, many prompts' mixed.

Plain Python; knows sequences and what steps them, nothing of devices.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from punica_jax.request import Completion
from punica_jax.sequence import SequenceState


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
    """What steps sequences until they end: `Engine`."""

    @property
    def busy(self) -> bool: ...

    def step(self) -> None: ...


def pieces(
    engine: Steps, sequences: Sequence[SequenceState], fresh: deque[Piece]
) -> Iterator[Piece]:
    """Step sequences to their ends, and yield what came after each step.

    Args:
      engine: holds the sequences.
      sequences: in order.
      fresh: where the sequences' `on_token` puts pieces.
    """
    unfinished = dict(enumerate(sequences))
    while engine.busy:
        engine.step()
        while fresh:
            yield fresh.popleft()
        ended = [i for i, one in unfinished.items() if one.finish_reason is not None]
        for index in ended:
            yield Piece(index, "", unfinished.pop(index).completion())
