"""What a caller asks for and what comes back: sampling parameters, completions.

Knows nothing of devices, JAX, tokenizers or scheduling: plain values, checked when
they are made, so that a bad one fails in the caller's own frame.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "exported", "error"]

# Far beyond this every distribution over finite logits is uniform in float32, and
# temperature * noise could overflow.
MAX_TEMPERATURE = 100.0
MAX_SEED = 2**32 - 1
MAX_LOGPROBS = 20
# A seat's bias travels as a list of this static length.
MAX_LOGIT_BIAS = 300
# They are searched for between two steps, while others' rows wait.
MAX_STOP_TEXTS = 64


def is_integer(value: object) -> bool:
    """Tell whether a value is an integer, NumPy's included, True and False not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    A token is drawn from the model's logits `x` in this order:

    1. `x[t] += logit_bias[t]`.
    2. Where t is in the prompt or the output, `x[t] /= repetition_penalty` if it is
       above 0, else `x[t] *= repetition_penalty`; then
       `x[t] -= frequency_penalty * c + presence_penalty * (c > 0)`, c being the times
       that t is in the output.
    3. `x[t] = -inf` for the tokens that stop, before `min_new_tokens`.
    4. At temperature 0 the answer is `argmax(x)`, the first one on a tie. Else
       `p = softmax(x / temperature)`, and of all tokens these are left:
    5. `top_k`: those not less likely than the k-th.
    6. `top_p`: of these, renormalised, the fewest most likely ones that hold `top_p`.
    7. `min_p`: of these, those with `p >= min_p * max(p)`.

    A filter keeps all of the tokens that tie at its limit.

    Attributes:
        n: completions of each prompt, at least 1, and 1 at temperature 0, where all
            would be the same. They share the prompt's full KV pages; with
            `prompt_logprobs` each computes all of it.
        max_new_tokens: most tokens to generate, at least 1; the stop token counts.
        min_new_tokens: tokens that come before a stop token can, or before a stop
            string can be complete; at most max_new_tokens.
        temperature: 0 takes the most likely token; at most 100.
        top_k: 1 or more; None, 0 and -1 are off.
        top_p: above 0, at most 1 (off).
        min_p: 0 (off) to 1.
        repetition_penalty: above 0, at most 100; 1 is off. Less than 1e-20 does what
            that does.
        presence_penalty: -2 to 2; 0 is off.
        frequency_penalty: -2 to 2; 0 is off.
        logit_bias: token id -> -100 to 100, at most 300 of them.
        stop: a text or up to 64 that end a completion, which is cut before the one
            that is complete first (the longest, where several are at once). Kept as a
            tuple.
        stop_token_ids: tokens that end a completion, beside the model's own. Kept as a
            tuple.
        include_stop_str_in_output: keep the stop string, or the stop token's text.
        ignore_eos: keep generating after the model's own stop tokens; those of
            stop_token_ids still stop.
        logprobs: tell the log-probability of each new token, and of the most likely
            so many, 0 to 20. They are `log_softmax` of the model's logits, before
            steps 1 to 7. None tells nothing.
        prompt_logprobs: the same for the prompt's tokens.
        seed: `0..2**32-1`. The k-th token of a request draws from this seed and its
            own position alone, so the same seed gives the same random numbers
            whatever the batch; the j-th of n completions takes `seed + j`, modulo
            `2**32`. None: a fresh seed for each completion.

    Raises:
        ValueError: a field breaks its rule; the text says which and what it was.
    """

    n: int = 1
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check_integers()
        self._check_numbers()
        self._check_stops()
        for name in ("include_stop_str_in_output", "ignore_eos"):
            check_flag(name, getattr(self, name))

    @property
    def changes_logits(self) -> bool:
        """Whether a bias or a penalty is set."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
        )

    def _check_integers(self) -> None:
        for name in ("n", "max_new_tokens"):
            value = getattr(self, name)
            if not is_integer(value) or value < 1:
                raise ValueError(
                    f"{name} must be an integer of at least 1, got {value!r}"
                )
        value = self.min_new_tokens
        if not is_integer(value) or not 0 <= value <= self.max_new_tokens:
            raise ValueError(
                "min_new_tokens must be an integer from 0 to max_new_tokens "
                f"{self.max_new_tokens}, got {value!r}"
            )
        if self.top_k is not None and not (is_integer(self.top_k) and self.top_k >= -1):
            raise ValueError(
                "top_k must be an integer of at least 1, or None, 0 or -1 for off, "
                f"got {self.top_k!r}"
            )
        limits = {
            "logprobs": MAX_LOGPROBS,
            "prompt_logprobs": MAX_LOGPROBS,
            "seed": MAX_SEED,
        }
        for name, most in limits.items():
            value = getattr(self, name)
            if value is not None and not (is_integer(value) and 0 <= value <= most):
                raise ValueError(
                    f"{name} must be None or an integer from 0 to {most}, got {value!r}"
                )
        # NumPy's narrow integers would overflow where lengths are added.
        for name in ("n", "max_new_tokens", "min_new_tokens", "top_k", *limits):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, int(value))

    def _check_numbers(self) -> None:
        for name, least, most, above in (
            ("temperature", 0, MAX_TEMPERATURE, False),
            ("top_p", 0, 1, True),
            ("min_p", 0, 1, False),
            ("repetition_penalty", 0, 100, True),
            ("presence_penalty", -2, 2, False),
            ("frequency_penalty", -2, 2, False),
        ):
            value = number_of(name, getattr(self, name), least, most, above=above)
            object.__setattr__(self, name, value)
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                "n must be 1 at temperature 0, where all completions would be the "
                f"same, got {self.n!r}"
            )
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(
                "logit_bias must be a mapping of token ids to numbers, "
                f"got {self.logit_bias!r}"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(
                f"logit_bias must have at most {MAX_LOGIT_BIAS} tokens, "
                f"got {len(self.logit_bias)}"
            )
        biases = {  # the caller's mapping may change later
            _token_of("logit_bias", token): number_of(
                f"logit_bias of token {token}", bias, -100, 100
            )
            for token, bias in self.logit_bias.items()
        }
        object.__setattr__(self, "logit_bias", biases)

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = () if stop is None else stop
        if not _is_sequence(stop) or not all(
            isinstance(text, str) and text for text in stop
        ):
            raise ValueError(
                "stop must be a text or a sequence of texts, none of them empty, "
                f"got {self.stop!r}"
            )
        if len(stop) > MAX_STOP_TEXTS:
            raise ValueError(
                f"stop must have at most {MAX_STOP_TEXTS} texts, got {len(stop)}"
            )
        tokens = () if self.stop_token_ids is None else self.stop_token_ids
        if not _is_sequence(tokens):
            raise ValueError(
                f"stop_token_ids must be a sequence of token ids, got {tokens!r}"
            )
        tokens = tuple(_token_of("stop_token_ids", token) for token in tokens)
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tokens)


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def check_flag(name: str, value: object) -> None:
    """Raise ValueError unless a value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def number_of(
    name: str, value: object, least: float, most: float, *, above: bool = False
) -> float:
    """Return a number as a float; raise ValueError if it is none in that span."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # of an integer
            number = math.nan
        # NaN, and what is beyond a float's range, lies in no span.
        if (least < number if above else least <= number) and number <= most:
            return number
    span = f"from {least} to {most:g}"
    if above:
        span = f"above {least}" + (f" and at most {most:g}" if most < math.inf else "")
    raise ValueError(f"{name} must be a number {span}, got {value!r}")


def _token_of(name: str, token: Any) -> int:
    # The end of the vocabulary is checked when there is a model.
    if not is_integer(token) or token < 0:
        raise ValueError(f"{name} must hold token ids, 0 or more, got {token!r}")
    return int(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """How likely a token was, by the model's own distribution.

    Attributes:
        logprob: natural logarithm of the token's probability.
        rank: 1 for the most likely token; 1 more than the tokens above it.
        top: the most likely tokens, as many as were asked for, and their
            log-probabilities, the most likely first and the lowest id first on a tie.
    """

    logprob: float
    rank: int
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer to one prompt.

    Two are equal that say the same, wherever they stand among others.

    Attributes:
        text: the new tokens as text; special tokens are left out, and what ended the
            completion too, unless include_stop_str_in_output.
        token_ids: the new tokens, in order, all that were generated: after
            finish_reason "stop" the last ones are the stop token or hold the stop
            string.
        finish_reason: "stop" (a stop token or string came), "length" (max_new_tokens
            or the end of the context was reached), "cancelled" (by the caller),
            "exported" (it goes on elsewhere) or "error" (nothing of others is lost).
        error: what went wrong, where something did: logits that are not finite, an
            adapter that cannot be had, an `on_token` that raised.
        stop_reason: the string or the token of the request that ended it; None where
            a stop token of the model did, or nothing.
        adapter: the adapter's name, None for the base model.
        prompt_token_ids: the prompt as the model saw it, special tokens included.
        prompt_index: the prompt's place among the prompts.
        sample_index: the completion's place among the prompt's, from 0 to n - 1.
        logprobs: one for each of token_ids; None where none were asked for.
        cumulative_logprob: the sum of theirs.
        prompt_logprobs: one for each of prompt_token_ids, None for the first, which
            nothing predicts; None where none were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None = None
    stop_reason: str | int | None = None
    adapter: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_index: int = field(default=0, compare=False)
    sample_index: int = field(default=0, compare=False)
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a request is treated among others.

    Attributes:
        priority: requests of a higher one are seated first, and their prompts pass
            those that have begun.
        tenant: on whose account it runs, where a policy keeps accounts.
        first_token_s: seconds from its arrival in which its first token should come; a
            target that a policy may order by. None is the policy's own.
        deadline_s: seconds from its arrival after which nobody wants it any more: it
            ends with `DeadlineError`. None is never.

    Raises:
        ValueError: a field breaks its rule.
    """

    priority: int = 0
    tenant: str = ""
    first_token_s: float | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if not is_integer(self.priority):
            raise ValueError(f"priority must be an integer, got {self.priority!r}")
        object.__setattr__(self, "priority", int(self.priority))
        if not isinstance(self.tenant, str):
            raise ValueError(f"tenant must be a text, got {self.tenant!r}")
        for name in ("first_token_s", "deadline_s"):
            value = getattr(self, name)
            if value is not None:
                # Not as it is given: the time now and a float16 make a float16.
                number = number_of(name, value, 0, math.inf, above=True)
                object.__setattr__(self, name, number)


class DeadlineError(TimeoutError):
    """A request's deadline has passed."""


class RequestError(RuntimeError):
    """A request failed: its logits are not finite, or its `on_token` raised."""
