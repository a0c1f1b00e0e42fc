"""What a caller asks for and what comes back: sampling parameters, completions.

Knows nothing of devices, JAX, tokenizers or scheduling: plain values, checked when
they are made, so that a bad one fails in the caller's own frame.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length"]

# Far beyond this every distribution over finite logits is uniform in float32, and
# temperature * noise could overflow.
MAX_TEMPERATURE = 100.0
MAX_SEED = 2**32 - 1


def is_integer(value: object) -> bool:
    """Tell whether a value is an integer, NumPy's included, True and False not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    Attributes:
        max_new_tokens: most tokens to generate, at least 1; the stop token counts.
        temperature: 0 takes the most likely token (the first one on a tie); above 0
            samples from softmax(logits / temperature). At most 100.
        seed: 0..2**32-1. The k-th token of a request draws from this seed and its
            own position alone, so the same seed gives the same random numbers
            whatever the batch. None: a fresh seed for each request.
        ignore_eos: keep generating after a stop token, to max_new_tokens.

    Raises:
        ValueError: a field breaks its rule; the text says which and what it was.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not is_integer(self.max_new_tokens) or self.max_new_tokens < 1:
            raise ValueError(
                "max_new_tokens must be an integer of at least 1, "
                f"got {self.max_new_tokens!r}"
            )
        if (
            not isinstance(self.temperature, Real)
            or isinstance(self.temperature, bool)
            or not math.isfinite(self.temperature)
            or not 0 <= self.temperature <= MAX_TEMPERATURE
        ):
            raise ValueError(
                f"temperature must be a number from 0 to {MAX_TEMPERATURE:g}, "
                f"got {self.temperature!r}"
            )
        if self.seed is not None and not (
            is_integer(self.seed) and 0 <= self.seed <= MAX_SEED
        ):
            raise ValueError(
                f"seed must be None or an integer from 0 to {MAX_SEED}, "
                f"got {self.seed!r}"
            )
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(
                f"ignore_eos must be True or False, got {self.ignore_eos!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One request's answer.

    Attributes:
        text: the new tokens as text, special tokens left out.
        token_ids: the new tokens, in order; after finish_reason "stop" the last one
            is the stop token.
        finish_reason: "stop" (a stop token came) or "length" (max_new_tokens or the
            end of the context was reached).
        adapter: the adapter's name, None for the base model.
        prompt_token_ids: the prompt as the model saw it, special tokens included.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    adapter: str | None
    prompt_token_ids: tuple[int, ...]
