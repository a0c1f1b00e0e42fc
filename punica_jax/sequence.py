"""One prompt on its way: its tokens so far, and how many the cache holds.

Plain Python; knows one sequence's numbers and text, nothing of batches or devices.
"""

import dataclasses
import secrets
from collections.abc import Callable, Sequence

from punica_jax.request import Completion, FinishReason, SamplingParams
from punica_jax.tokenizer import Detokenizer, Tokenizer

# Called with the prompt's index and its newest piece of text.
TokenCallback = Callable[[int, str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The rows that one sequence has in a step.

    Attributes:
      tokens: the rows' tokens, the sequence's last ones so far.
      kv_len: tokens of the sequence, these included.
      pages: its KV pages, in order, enough for `kv_len`.
      slot: its adapter's slot, -1 for none.
      temperature: 0 is greedy.
      seed: of its random numbers.
    """

    tokens: Sequence[int]
    kv_len: int
    pages: Sequence[int]
    slot: int
    temperature: float
    seed: int


class SequenceState:
    """A prompt and what it has become.

    Attributes:
      finish_reason: None while the sequence is in flight.
      seat: its place among the sequences in flight, -1 before it has one.
      pages: its KV pages, none before it has a seat.
      max_len: most tokens that it can have, prompt and output.
    """

    def __init__(
        self,
        *,
        index: int,
        prompt: list[int],
        adapter: str | None,
        slot: int,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        max_model_len: int,
        on_token: TokenCallback | None,
    ):
        self.finish_reason: FinishReason | None = None
        self.seat = -1
        self.pages: Sequence[int] = ()
        self._index = index
        self._adapter = adapter
        self._slot = slot
        self._sampling = sampling
        self._seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self._eos = frozenset() if sampling.ignore_eos else tokenizer.eos_token_ids
        self._num_prompt = len(prompt)
        room = max_model_len - self._num_prompt
        self.max_len = self._num_prompt + min(sampling.max_new_tokens, room)
        self._tokens = prompt
        self._num_cached = 0
        self._pieces: list[str] = []
        self._detokenizer = Detokenizer(tokenizer)
        self._on_token = on_token

    @property
    def num_left(self) -> int:
        """Tokens that the cache does not hold yet."""
        return len(self._tokens) - self._num_cached

    def sit(self, seat: int, pages: Sequence[int]) -> None:
        """Take a seat, and KV pages for `max_len` tokens."""
        self.seat = seat
        self.pages = pages

    def chunk(self, rows: int) -> Chunk:
        """Return the next `rows` tokens as rows of a step."""
        end = self._num_cached + rows
        return Chunk(
            tokens=self._tokens[self._num_cached : end],
            kv_len=end,
            pages=self.pages,
            slot=self._slot,
            temperature=self._sampling.temperature,
            seed=self._seed,
        )

    def advance(self, rows: int, token: int) -> None:
        """Take note of a step; its token counts if the prompt is through."""
        self._num_cached += rows
        if self.num_left:
            return
        self._tokens.append(token)
        if token in self._eos:
            self.finish_reason = "stop"
        elif len(self._tokens) == self.max_len:
            self.finish_reason = "length"
        self._emit(self._detokenizer.push(token))
        if self.finish_reason is not None:
            self._emit(self._detokenizer.finish())

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            text="".join(self._pieces),
            token_ids=tuple(self._tokens[self._num_prompt :]),
            finish_reason=self.finish_reason,
            adapter=self._adapter,
            prompt_token_ids=tuple(self._tokens[: self._num_prompt]),
        )

    def _emit(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            if self._on_token is not None:
                self._on_token(self._index, piece)
