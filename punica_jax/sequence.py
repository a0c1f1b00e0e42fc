"""One prompt on its way: its tokens so far, and how many the cache holds.

Plain Python; knows one sequence's numbers and text, nothing of batches or devices.
"""

import dataclasses
import secrets
from collections.abc import Callable, Sequence

from punica_jax.request import (
    MAX_SEED,
    Completion,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
)
from punica_jax.stops import StopStrings
from punica_jax.tokenizer import Detokenizer, Tokenizer

# Called with the completion's place in the list that is returned (where every n is 1,
# the prompt's) and its newest piece of text.
TokenCallback = Callable[[int, str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The rows that one sequence has in a step.

    Attributes:
      tokens: the rows' tokens, the sequence's last ones so far.
      kv_len: tokens of the sequence, these included.
      pages: its KV pages, in order, enough for `kv_len`.
      slot: its adapter's slot, -1 for none.
      seat: the seat by which its next token is drawn; -1 where it is the most likely
        one, or where the prompt goes on.
      wants_logprobs: whether its next token's log-probabilities are wanted.
      targets: the prompt's tokens after its first rows, one each, whose
        log-probabilities are wanted.
    """

    tokens: Sequence[int]
    kv_len: int
    pages: Sequence[int]
    slot: int
    seat: int = -1
    wants_logprobs: bool = False
    targets: Sequence[int] = ()


class SequenceState:
    """A prompt and what it has become.

    Attributes:
      finish_reason: None while the sequence is in flight.
      seat: its place among the sequences in flight, -1 before it has one.
      pages: its KV pages, none before it has a seat.
      num_cached: tokens whose keys and values are in them.
      weights: what reads its tokens: the version of its adapter.
      max_len: most tokens that it can have, prompt and output.
      sampling: how its tokens are chosen.
      seed: of its random numbers.
      stop_ids: the tokens that end it.
      draws: whether its tokens are drawn by its seat's parameters; else each is the
        most likely one.
    """

    def __init__(
        self,
        *,
        index: int,
        prompt_index: int,
        sample_index: int,
        prompt: list[int],
        adapter: str | None,
        slot: int,
        weights: int,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        max_model_len: int,
        on_token: TokenCallback | None,
    ):
        self.finish_reason: FinishReason | None = None
        self.seat = -1
        self.pages: Sequence[int] = ()
        self.num_cached = 0
        self.weights = weights
        self.sampling = sampling
        if sampling.seed is None:
            self.seed = secrets.randbits(32)
        else:
            self.seed = (int(sampling.seed) + sample_index) & MAX_SEED
        self._eos = frozenset() if sampling.ignore_eos else tokenizer.eos_token_ids
        self.stop_ids = self._eos | frozenset(sampling.stop_token_ids or ())
        self.draws = bool(
            sampling.temperature > 0
            or sampling.changes_logits
            or (sampling.min_new_tokens and self.stop_ids)
        )
        self._index = index
        self._prompt_index = prompt_index
        self._sample_index = sample_index
        self._adapter = adapter
        self._slot = slot
        self._num_prompt = len(prompt)
        room = max_model_len - self._num_prompt
        self.max_len = self._num_prompt + min(sampling.max_new_tokens, room)
        self._tokens = prompt
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._stop_reason: str | int | None = None
        self._pieces: list[str] = []
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(
            tuple(sampling.stop or ()), include=sampling.include_stop_str_in_output
        )
        self._on_token = on_token

    @property
    def num_left(self) -> int:
        """Tokens that the cache does not hold yet."""
        return len(self._tokens) - self.num_cached

    @property
    def prompt(self) -> list[int]:
        """The prompt's tokens."""
        return self._tokens[: self._num_prompt]

    @property
    def cached(self) -> list[int]:
        """The tokens whose keys and values are in its pages."""
        return self._tokens[: self.num_cached]

    def sit(self, seat: int, pages: Sequence[int], num_cached: int) -> None:
        """Take a seat, and KV pages for `max_len` tokens.

        Args:
          seat: which.
          pages: in order.
          num_cached: tokens of the prompt that they hold already.
        """
        self.seat = seat
        self.pages = pages
        self.num_cached = num_cached

    def chunk(self, rows: int) -> Chunk:
        """Return the next `rows` tokens as rows of a step."""
        start, end = self.num_cached, self.num_cached + rows
        ends = end == len(self._tokens)
        targets: Sequence[int] = ()
        if self.sampling.prompt_logprobs is not None:
            targets = self._tokens[start + 1 : min(end + 1, self._num_prompt)]
        return Chunk(
            tokens=self._tokens[start:end],
            kv_len=end,
            pages=self.pages,
            slot=self._slot,
            seat=self.seat if ends and self.draws else -1,
            wants_logprobs=ends and self.sampling.logprobs is not None,
            targets=targets,
        )

    def advance(
        self,
        rows: int,
        token: int,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Take note of a step; its token counts if the prompt is through.

        Args:
          rows: the chunk's.
          token: the next one.
          logprobs: the token's, if the chunk wanted them.
          prompt_logprobs: those of the chunk's targets.
        """
        self.num_cached += rows
        self._prompt_logprobs += prompt_logprobs
        if self.num_left:
            return
        self._tokens.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        num_new = len(self._tokens) - self._num_prompt
        may_stop = num_new > self.sampling.min_new_tokens
        stops = may_stop and token in self.stop_ids
        if not stops or self.sampling.include_stop_str_in_output:
            self._emit(self._detokenizer.push(token), may_stop)
        if stops or self._stops.found or len(self._tokens) == self.max_len:
            self._finish(token, stops, may_stop)

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        logprobs = prompt_logprobs = cumulative = None
        if self.sampling.logprobs is not None:
            logprobs = tuple(self._logprobs)
            cumulative = sum(entry.logprob for entry in logprobs)
        if self.sampling.prompt_logprobs is not None:
            prompt_logprobs = tuple(self._prompt_logprobs)
        return Completion(
            text="".join(self._pieces),
            token_ids=tuple(self._tokens[self._num_prompt :]),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            adapter=self._adapter,
            prompt_token_ids=tuple(self.prompt),
            prompt_index=self._prompt_index,
            sample_index=self._sample_index,
            logprobs=logprobs,
            cumulative_logprob=cumulative,
            prompt_logprobs=prompt_logprobs,
        )

    def _finish(self, token: int, stops: bool, may_stop: bool) -> None:
        # What the detokenizer held back came before a stop token.
        self._emit(self._detokenizer.finish(), may_stop)
        if self._stops.found is not None:
            self.finish_reason, self._stop_reason = "stop", self._stops.found
        elif stops:
            self.finish_reason = "stop"
            self._stop_reason = None if token in self._eos else token
        else:
            self.finish_reason = "length"
        self._show(self._stops.finish())

    def _emit(self, piece: str, may_stop: bool) -> None:
        self._show(self._stops.push(piece, may_stop=may_stop))

    def _show(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            if self._on_token is not None:
                self._on_token(self._index, piece)
