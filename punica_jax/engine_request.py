"""One request of an engine, and the way back to whoever asked.

Knows its sequences and the asker's event loop; nothing of steps.
"""

import asyncio
import copy
import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any

from punica_jax.prompts import Prompts
from punica_jax.random_bits import random_bits
from punica_jax.request import RequestError, SamplingParams, Terms
from punica_jax.request_state import RequestState, SampleState
from punica_jax.sequence import SequenceState
from punica_jax.stats import AdapterStats
from punica_jax.stream import Piece


class QueueFullError(RuntimeError):
    """More requests wait than may."""


class EngineClosedError(RuntimeError):
    """The engine has been closed, or an error has ended it."""


class EngineRequest:
    """One request's sequences, and the way back to whoever asked.

    Attributes:
      name: its id; made where none is given.
      sequences: one for each completion.
      is_resumed: whether it goes on from elsewhere, where it was let in.
      loop: the asker's event loop.
      fresh: what has come and is not handed over.
    """

    def __init__(
        self,
        name: str | None,
        sequences: Sequence[SequenceState],
        sampling: SamplingParams,
        terms: Terms,
        fresh: list[Piece | Exception],
    ):
        self.name = request_name(name)
        self.sequences = sequences
        self._places = {sequence: index for index, sequence in enumerate(sequences)}
        self.sampling = sampling
        self.terms = terms
        self.fresh = fresh
        self.is_resumed = False
        self.loop = asyncio.get_running_loop()
        self.news: asyncio.Queue[list[Piece | Exception]] = asyncio.Queue()

    @classmethod
    async def of(
        cls,
        prompts: Prompts,
        prompt: Any,
        adapter: Any,
        sampling: SamplingParams,
        terms: Terms,
        name: str | None,
    ) -> "EngineRequest":
        """Return what is asked for, checked.

        Args:
          prompts: makes its sequences.
          prompt: see `Engine.generate`, and for the rest.

        Raises:
          ValueError: something breaks its rule.
        """
        fresh: list[Piece | Exception] = []
        sequences = await prompts.sequences_of_one(
            prompt,
            adapter,
            sampling,
            lambda index, text: fresh.append(Piece(index, text)),
            default=sampling,
            terms=terms,
        )
        return cls(name, sequences, sequences[0].sampling, terms, fresh)

    def replay(self, samples: Sequence[SampleState], vocab_size: int) -> None:
        """Go on from where its completions stood elsewhere.

        Raises:
          ValueError: they cannot have stood there.
        """
        if len(samples) != len(self.sequences):
            raise ValueError(
                f"a state must have a sample for each of n = {len(self.sequences)} "
                f"completions, got {len(samples)}"
            )
        self.is_resumed = True
        for sequence, sample in zip(self.sequences, samples, strict=True):
            if max(sample.token_ids, default=0) >= vocab_size:
                raise ValueError(
                    f"a sample's tokens must be from 0 to {vocab_size - 1}, got "
                    f"{max(sample.token_ids)}"
                )
            sequence.replay(sample)

    def end(self, sequence: SequenceState) -> None:
        """Take a completion's end."""
        if sequence.error is not None:
            self.fresh.append(own_copy(sequence.error))
        else:
            place = self._places[sequence]
            self.fresh.append(Piece(place, "", sequence.completion()))

    @property
    def can_go_on(self) -> bool:
        """Whether tokens are to come, beside those of steps that are not collected."""
        has_failed = any(sequence.error is not None for sequence in self.sequences)
        return not has_failed and not all(one.is_over for one in self.sequences)

    @property
    def state(self) -> RequestState:
        first = self.sequences[0]
        samples = [sequence.state for sequence in self.sequences]
        # One that has not begun goes on under the weights of those that have.
        digest = next(filter(None, (one.adapter_digest for one in samples)), None)
        return RequestState(
            prompt_token_ids=tuple(first.tokens[: first.num_prompt]),
            adapter=first.adapter,
            sampling=self.sampling,
            terms=self.terms,
            samples=tuple(
                dataclasses.replace(one, adapter_digest=digest) for one in samples
            ),
        )


def request_name(name: str | None) -> str:
    """Return a request's id; one that nobody has where none is given.

    Raises:
      ValueError: it is no text.
    """
    if name is None:
        return f"request {uuid.UUID(int=random_bits(128), version=4)}"
    if not isinstance(name, str):
        raise ValueError(f"request_id must be a text, got {name!r}")
    return name


def own_copy(error: Exception) -> Exception:
    """Return an error that says the same as one that several get.

    Whoever raises an error adds frames to it, which hold the caller's variables.
    """
    try:
        own = copy.copy(error)
    except Exception:  # not every class of others' can be copied
        own = RequestError(f"{type(error).__name__}: {error}")
    own.__cause__ = error.__cause__
    return own


def count_end(stats: AdapterStats, sequence: SequenceState) -> None:
    """Add a sequence that has ended."""
    if sequence.finish_reason == "error":
        stats.num_failed += 1
    elif sequence.finish_reason == "cancelled":
        stats.num_cancelled += 1
    elif sequence.finish_reason == "exported":
        stats.num_exported += 1
    else:
        stats.num_finished += 1
    num_new = len(sequence.new_tokens) - sequence.num_replayed
    stats.num_prompt_tokens += sequence.num_prompt
    stats.num_new_tokens += num_new
    if sequence.seated_s is not None:
        stats.queue_s.add(sequence.seated_s - sequence.arrived_s)
    if sequence.first_token_s is not None and sequence.newest_token_s is not None:
        stats.first_token_s.add(sequence.first_token_s - sequence.arrived_s)
        if num_new > 1:
            spent_s = sequence.newest_token_s - sequence.first_token_s
            stats.token_s.add(spent_s / (num_new - 1))
