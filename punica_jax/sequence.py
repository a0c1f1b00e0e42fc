"""One prompt on its way: its tokens so far, and how many the cache holds.

Plain Python; knows one sequence's numbers and text, nothing of batches or devices.
"""

import array
import functools
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from punica_jax.chunk import Chunk
from punica_jax.pages import extend_digests
from punica_jax.random_bits import random_bits
from punica_jax.request import (
    MAX_SEED,
    Completion,
    FinishReason,
    SamplingParams,
    Terms,
    TokenLogprobs,
)
from punica_jax.request_state import SampleState, weights_error
from punica_jax.tokenizer import Tokenizer
from punica_jax.transcript import TokenCallback, Transcript

DEFAULT_TERMS = Terms()
_log = logging.getLogger(__name__)


class SequenceState:
    """A prompt and what it has become.

    Its tokens are those that the host knows, and up to two more that steps in flight
    will give.

    Attributes:
      adapter: the name of its adapter, None for the base model.
      finish_reason: None while the sequence is in flight.
      error: what ended it before its time, if anything did.
      seat: its place among the sequences in flight, -1 while it waits.
      pages: its KV pages, none while it waits.
      num_cached: tokens whose keys and values are in them once all steps launched are
        through.
      num_in_flight: its steps that are launched and not collected.
      num_replayed: tokens that came elsewhere, before it went on here.
      num_published: its full pages that others can find.
      page_digests: stand for its full pages, as far as their tokens are known.
      weights: what reads its tokens: the version of its adapter, from its first seat.
      group: the samples of its prompt, which have the same weights; None if alone.
      num_prompt: tokens of the prompt.
      max_len: most tokens that it can have, prompt and output.
      arrival: its number among all that came; set by whom it waits at.
      arrived_s, seated_s, first_token_s, newest_token_s: when it was made, had its
        first seat, and got tokens; by `time.monotonic`, None for not yet.
      terms: how it is treated among others.
      sampling: how its tokens are chosen.
      seed: of its random numbers.
      stop_ids: the tokens that end it.
      has_drawn: whether its seat has been told how.
      draws: whether its tokens are drawn by its seat's parameters; else each is the
        most likely one.
    """

    # A step that looks at a thousand that wait takes a tenth to a fifth less so.
    __slots__ = tuple(
        "_eos _logprobs _num_pending _page_size _prompt_index _prompt_logprobs "
        "_sample_index _slot _stop_reason _tokens _transcript adapter adapter_digest "
        "arrival arrived_s draws error finish_reason first_token_s group has_drawn "
        "max_len newest_token_s num_cached num_in_flight num_prompt num_published "
        "num_replayed page_digests pages sampling seat seated_s seed stop_ids terms "
        "weights __weakref__".split()
    )

    def __init__(
        self,
        *,
        index: int,
        prompt_index: int,
        sample_index: int,
        prompt: list[int],
        adapter: str | None,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        max_model_len: int,
        page_size: int,
        on_token: TokenCallback | None,
        terms: Terms = DEFAULT_TERMS,
        group: Hashable = None,
    ):
        self.adapter, self.group = adapter, group
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.seat = self.arrival = self._slot = -1
        self.pages: Sequence[int] = ()
        self.num_cached = self.num_in_flight = 0
        self.num_published = self.num_replayed = 0
        self.weights: Hashable = None
        self.adapter_digest: str | None = None  # which it began with elsewhere
        self.arrived_s = time.monotonic()
        self.seated_s: float | None = None
        self.first_token_s: float | None = None
        self.newest_token_s: float | None = None
        self.terms, self.sampling = terms, sampling
        seed = random_bits(32) if sampling.seed is None else int(sampling.seed)
        self.seed = (seed + sample_index) & MAX_SEED
        self._eos = frozenset() if sampling.ignore_eos else tokenizer.eos_token_ids
        self.stop_ids = self._eos | frozenset(sampling.stop_token_ids or ())
        self.has_drawn = False
        must_go_on = bool(sampling.min_new_tokens and self.stop_ids)
        self.draws = sampling.temperature > 0 or sampling.changes_logits or must_go_on
        self._prompt_index, self._sample_index = prompt_index, sample_index
        self.num_prompt = len(prompt)
        room = max_model_len - self.num_prompt
        self.max_len = self.num_prompt + min(sampling.max_new_tokens, room)
        self._tokens = array.array("i", prompt)  # a step copies its slices
        self._page_size = page_size
        self.page_digests: list[bytes] = []
        extend_digests(self.page_digests, self._tokens, page_size)
        self._num_pending = 0  # tokens that steps in flight will give
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._stop_reason: str | int | None = None
        show = None if on_token is None else functools.partial(on_token, index)
        self._transcript = Transcript(tokenizer, prompt, sampling, show)

    @property
    def is_over(self) -> bool:
        """Whether no further token of it counts."""
        return self.finish_reason is not None

    @property
    def num_left(self) -> int:
        """Rows that it needs in steps to come, as far as anybody knows now."""
        num_tokens = len(self._tokens) + self._num_pending
        is_last = self.is_over or num_tokens == self.max_len
        return 0 if is_last else num_tokens - self.num_cached

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt's tokens and the new ones, as far as known; keep copies alone."""
        return self._tokens

    @property
    def new_tokens(self) -> list[int]:
        """The tokens that came after the prompt, as far as they are known."""
        return self._tokens[self.num_prompt :].tolist()

    @property
    def num_known_cached(self) -> int:
        """Tokens that the host knows, of those that `num_cached` counts."""
        return min(self.num_cached, len(self._tokens))

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are still to come."""
        wanted = self.sampling.prompt_logprobs is not None
        return wanted and len(self._prompt_logprobs) < self.num_prompt

    def sit(
        self,
        seat: int,
        pages: Sequence[int],
        num_cached: int,
        *,
        slot: int,
        weights: Hashable,
    ) -> None:
        """Take a seat.

        Args:
          seat: which.
          pages: KV pages, in order.
          num_cached: tokens that they hold already.
          slot: its adapter's, -1 for none.
          weights: stands for the base model and this version of the adapter.
        """
        self.seat = seat
        self.pages = pages
        self.num_cached = num_cached
        self.weights = weights
        self._slot = slot
        self.seated_s = self.seated_s or time.monotonic()

    def stand(self) -> None:
        """Give up the seat and what the cache holds; all of it is computed again."""
        assert not self.num_in_flight, "a step still writes to its pages"
        self.seat, self.pages, self.num_cached, self._slot = -1, (), 0, -1
        self.num_published, self.has_drawn = 0, False
        if self.wants_prompt_logprobs:
            self._prompt_logprobs = [None]

    def launch(self, rows: int) -> Chunk:
        """Return the next `rows` tokens as rows of a step that is being launched."""
        start, end = self.num_cached, self.num_cached + rows
        ends = rows == self.num_left
        tokens = self._tokens[start:end]
        is_kept = len(tokens) < rows
        if is_kept:
            tokens.append(0)
        assert len(tokens) == rows, (rows, len(tokens))
        targets: Sequence[int] = ()
        if self.wants_prompt_logprobs:
            targets = self._tokens[start + 1 : min(end + 1, self.num_prompt)]
        self.num_cached = end
        self.num_in_flight += 1
        self._num_pending += ends
        return Chunk(
            tokens=tokens,
            kv_len=end,
            pages=self.pages,
            slot=self._slot,
            seat=self.seat,
            ends=ends,
            is_kept=is_kept,
            draws=ends and self.draws,
            wants_logprobs=ends and self.sampling.logprobs is not None,
            targets=targets,
        )

    def collect(
        self,
        chunk: Chunk,
        token: int,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Take note of what a step gave; after the end of the sequence, of nothing.

        Args:
          chunk: its rows in the step, as `launch` returned them.
          token: the next one; it counts if the chunk ends.
          logprobs: the token's, if the chunk wanted them.
          prompt_logprobs: those of the chunk's targets.
        """
        self.num_in_flight -= 1
        self._num_pending -= chunk.ends
        began = self.adapter_digest
        if began is not None and began != self._known_digest:
            self.fail(weights_error(self.adapter, began, self._known_digest))
        if self.is_over:
            return
        self._prompt_logprobs += prompt_logprobs
        if chunk.ends:
            self.newest_token_s = time.monotonic()
            self.first_token_s = self.first_token_s or self.newest_token_s
            self._guard(self._take, token, logprobs)

    def replay(self, sample: SampleState) -> None:
        """Go on from where the same request stood elsewhere; nothing is shown of it.

        Raises:
          ValueError: it cannot have stood there.
        """
        assert not self.new_tokens and self.seat < 0
        wants = self.sampling.logprobs is not None
        sample.check(self.max_len - self.num_prompt, has_logprobs=wants)
        self.seed = sample.seed
        self.adapter_digest = sample.adapter_digest
        self.num_replayed = len(sample.token_ids)
        if len(sample.prompt_logprobs) == self.num_prompt:
            self._prompt_logprobs = list(sample.prompt_logprobs)
        show, self._transcript.show = self._transcript.show, None
        for i, token in enumerate(sample.token_ids):
            if self.is_over:
                raise ValueError(f"a sample ends with its token {i}, got more of them")
            self._take(token, sample.logprobs[i] if wants else None)
        self._transcript.show = show

    @property
    def state(self) -> SampleState:
        """What `replay` needs elsewhere."""
        return SampleState(
            seed=self.seed,
            token_ids=tuple(self.new_tokens),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            adapter_digest=self._known_digest,
        )

    @property
    def _known_digest(self) -> str | None:
        if isinstance(self.weights, tuple) and self.weights[0] == "digest":
            return self.weights[1]
        return self.adapter_digest

    def _take(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Add a token, show its text, and end where it says so."""
        self._tokens.append(token)
        if len(self._tokens) % self._page_size == 0:
            extend_digests(self.page_digests, self._tokens, self._page_size)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        num_new = len(self._tokens) - self.num_prompt
        may_stop = num_new > self.sampling.min_new_tokens
        stops = may_stop and token in self.stop_ids
        if not stops or self.sampling.include_stop_str_in_output:
            self._transcript.push(token, may_stop=may_stop)
        if stops or self._transcript.found or len(self._tokens) == self.max_len:
            self._finish(token, stops, may_stop)

    def cancel(self, reason: FinishReason = "cancelled") -> None:
        """End it where it is."""
        assert not self.is_over
        if reason != "exported":  # else what is held back is shown where it goes on
            self._guard(self._transcript.finish, may_stop=False)
        if not self.is_over:
            self.finish_reason = reason

    def fail(self, error: Exception) -> None:
        """End it before its time, unless it is over already."""
        if not self.is_over:
            # One error may fail many: each one's frames would gather in its traceback.
            self.error, self.finish_reason = error.with_traceback(None), "error"

    def completion(self) -> Completion:
        """Return what came of the prompt."""
        assert self.finish_reason is not None
        logprobs = prompt_logprobs = cumulative = None
        if self.sampling.logprobs is not None:
            logprobs = tuple(self._logprobs)
            cumulative = sum(entry.logprob for entry in logprobs)
        if self.sampling.prompt_logprobs is not None:
            prompt_logprobs = tuple(self._prompt_logprobs)
        return Completion(
            text=self._transcript.text,
            token_ids=tuple(self.new_tokens),
            finish_reason=self.finish_reason,
            error=None if self.error is None else str(self.error),
            stop_reason=self._stop_reason,
            adapter=self.adapter,
            prompt_token_ids=tuple(self._tokens[: self.num_prompt]),
            prompt_index=self._prompt_index,
            sample_index=self._sample_index,
            logprobs=logprobs,
            cumulative_logprob=cumulative,
            prompt_logprobs=prompt_logprobs,
        )

    def _finish(self, token: int, stops: bool, may_stop: bool) -> None:
        # What was held back came before a stop token; it may hold a stop string.
        self._transcript.finish(may_stop=may_stop)
        if self._transcript.found is not None:
            self.finish_reason, self._stop_reason = "stop", self._transcript.found
        elif stops:
            self.finish_reason = "stop"
            self._stop_reason = None if token in self._eos else token
        else:
            self.finish_reason = "length"

    def _guard(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call what shows its text: what that raises is this sequence's alone."""
        try:
            call(*args, **kwargs)
        except Exception as error:
            _log.exception("a request has failed")  # `error` says not where
            self.fail(error)
