"""A request under way, whole and as text, to go on elsewhere.

Plain values; knows nothing of engines, devices or how it gets there.
"""

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

from punica_jax.request import (
    MAX_SEED,
    SamplingParams,
    Terms,
    TokenLogprobs,
    is_integer,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleState:
    """Where one of a request's completions stands.

    Attributes:
        seed: of its random numbers.
        token_ids: that came after the prompt.
        logprobs: theirs, where they were asked for.
        prompt_logprobs: those of the prompt, as far as they are known.
        adapter_digest: of the weights that they came from, if it is known.

    Raises:
        ValueError: the seed or a token is none.
    """

    seed: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    adapter_digest: str | None = None

    def __post_init__(self) -> None:
        if not is_integer(self.seed) or not 0 <= self.seed <= MAX_SEED:
            raise ValueError(
                f"seed must be an integer from 0 to {MAX_SEED}, got {self.seed!r}"
            )
        for token in self.token_ids:
            if not is_integer(token) or token < 0:
                raise ValueError(f"token_ids must be 0 or more, got {token!r}")
        object.__setattr__(self, "seed", int(self.seed))
        object.__setattr__(self, "token_ids", tuple(map(int, self.token_ids)))
        if not isinstance(self.adapter_digest, str | None):
            raise ValueError(
                f"adapter_digest must be text or None, got {self.adapter_digest!r}"
            )

    def check(self, room: int, *, has_logprobs: bool) -> None:
        """Check that a completion can stand here.

        Args:
          room: most tokens of it.
          has_logprobs: whether its tokens' log-probabilities are asked for.

        Raises:
          ValueError: it cannot.
        """
        num_tokens, num_logprobs = len(self.token_ids), len(self.logprobs)
        if num_tokens > room:
            raise ValueError(
                f"a sample must have at most {room} tokens here, got {num_tokens}"
            )
        if num_logprobs != (num_tokens if has_logprobs else 0):
            raise ValueError(
                "a sample must have log-probabilities of "
                f"{'all' if has_logprobs else 'none'} of its {num_tokens} tokens, got "
                f"{num_logprobs}"
            )
        known = [entry for entry in self.prompt_logprobs if entry is not None]
        for entry in (*self.logprobs, *known):
            if not _is_logprobs(entry):
                raise ValueError(
                    "logprobs must be TokenLogprobs of a number, a rank of at least 1, "
                    f"and tokens and their numbers, got {entry!r}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """A request under way, whole: any engine with its base and adapter goes on with it.

    The prompt and what came of it are computed there once more (Punica, section 5.3);
    no KV cache travels.

    Attributes:
        prompt_token_ids: the prompt.
        adapter: its adapter's name, None for the base model.
        sampling: how its tokens are chosen.
        terms: how it is treated among others; its deadline begins anew.
        samples: where each of its `n` completions stands.

    Raises:
        ValueError: `samples` holds something else than `SampleState`s.
    """

    prompt_token_ids: tuple[int, ...]
    adapter: str | None
    sampling: SamplingParams
    terms: Terms
    samples: tuple[SampleState, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.samples, Sequence) or not all(
            isinstance(sample, SampleState) for sample in self.samples
        ):
            raise ValueError(
                f"samples must be SampleStates, got {reprlib.repr(self.samples)}"
            )

    def to_json(self) -> str:
        """Return all of it as text."""
        return json.dumps(asdict(self), default=lambda number: number.item())

    @classmethod
    def from_json(cls, text: str) -> "RequestState":
        """Read what `to_json` wrote.

        Raises:
          ValueError: it is something else.
        """
        try:
            fields = json.loads(text)
            sampling = fields["sampling"]
            if sampling["logit_bias"] is not None:
                bias = sampling["logit_bias"].items()
                sampling["logit_bias"] = {int(token): value for token, value in bias}
            return cls(
                prompt_token_ids=tuple(fields["prompt_token_ids"]),
                adapter=fields["adapter"],
                sampling=SamplingParams(**sampling),
                terms=Terms(**fields["terms"]),
                samples=tuple(
                    SampleState(
                        seed=sample["seed"],
                        token_ids=tuple(sample["token_ids"]),
                        logprobs=_logprobs_of(sample["logprobs"]),
                        prompt_logprobs=_logprobs_of(sample["prompt_logprobs"]),
                        adapter_digest=sample.get("adapter_digest"),
                    )
                    for sample in fields["samples"]
                ),
            )
        except (
            *(KeyError, TypeError, AttributeError, OverflowError, RecursionError),
            json.JSONDecodeError,
        ) as error:
            raise ValueError(f"this is no RequestState: {error!r}") from error


def check_state(state: Any) -> None:
    """Raise ValueError unless it is a `RequestState`."""
    if not isinstance(state, RequestState):
        raise ValueError(
            "state must be a RequestState as Engine.export returns it "
            "(RequestState.from_json makes one of its text), got "
            f"{reprlib.repr(state)}"
        )


def weights_error(adapter: str | None, began: object, got: object) -> ValueError:
    """Return what is wrong where an adapter's digest is another one."""
    return ValueError(
        f"adapter {adapter!r} must have the weights that the request began with, of "
        f"digest {began}; here they are {got}; register those under this name, or send "
        "the prompt anew"
    )


def _is_logprobs(entry: Any) -> bool:
    return (
        isinstance(entry, TokenLogprobs)
        and is_integer(entry.rank)
        and entry.rank >= 1
        and isinstance(entry.top, Mapping)
        and all(map(is_integer, entry.top))
        and all(map(_is_float, (entry.logprob, *entry.top.values())))
    )


def _is_float(value: Any) -> bool:
    """Tell whether it is a number, finite or -inf, that a float can be."""
    if not isinstance(value, Real):
        return False
    try:
        return float(value) < math.inf
    except OverflowError:  # of an integer
        return False


def _logprobs_of(entries: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        entry
        and TokenLogprobs(
            logprob=entry["logprob"],
            rank=entry["rank"],
            top={int(token): value for token, value in entry["top"].items()},
        )
        for entry in entries
    )
