"""What a sequence says: its new tokens as text, shown piece by piece as it is certain.

Plain Python; knows tokens, texts and who is shown them, nothing of steps.
"""

from collections.abc import Callable, Sequence

from punica_jax.request import RequestError, SamplingParams
from punica_jax.stops import StopStrings
from punica_jax.tokenizer import Detokenizer, Tokenizer

# Called with the completion's place in the list that is returned (where every n is 1,
# the prompt's) and its newest piece of text. Where it raises, that completion fails.
TokenCallback = Callable[[int, str], None]


class Transcript:
    """The text of new tokens, up to a stop string.

    Attributes:
      show: called with each piece, if anything is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        sampling: SamplingParams,
        show: Callable[[str], object] | None,
    ):
        """Begin behind a prompt.

        Args:
          tokenizer: whose tokens come.
          prompt: those that were there before.
          sampling: says which texts stop it.
          show: see `Transcript`.
        """
        self.show = show
        self._pieces: list[str] = []
        self._detokenizer = Detokenizer(tokenizer, prompt=prompt)
        self._stops = StopStrings(
            tuple(sampling.stop or ()), include=sampling.include_stop_str_in_output
        )

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def found(self) -> str | None:
        """The stop string that ended it, None before."""
        return self._stops.found

    def push(self, token: int, *, may_stop: bool) -> None:
        """Add a token.

        Args:
          token: the next one.
          may_stop: whether a stop string may be complete in its text.

        Raises:
          RequestError: `show` has raised.
        """
        self._emit(self._detokenizer.push(token), may_stop)

    def finish(self, *, may_stop: bool) -> None:
        """Add what is held back; see `push`."""
        self._emit(self._detokenizer.finish(), may_stop)
        self._add(self._stops.finish())

    def _emit(self, piece: str, may_stop: bool) -> None:
        self._add(self._stops.push(piece, may_stop=may_stop))

    def _add(self, piece: str) -> None:
        if not piece:
            return
        self._pieces.append(piece)
        if self.show is not None:
            try:
                self.show(piece)
            except Exception as error:
                raise RequestError(f"on_token raised {error!r}") from error
