"""A request under way, whole and as text, to go on elsewhere.

Plain values; knows nothing of engines, devices or how it gets there.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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

    Raises:
        ValueError: the seed or a token is none.
    """

    seed: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    def __post_init__(self) -> None:
        if not is_integer(self.seed) or not 0 <= self.seed <= MAX_SEED:
            raise ValueError(
                f"seed must be an integer from 0 to {MAX_SEED}, got {self.seed!r}"
            )
        for token in self.token_ids:
            if not is_integer(token) or token < 0:
                raise ValueError(f"token_ids must be 0 or more, got {token!r}")


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
    """

    prompt_token_ids: tuple[int, ...]
    adapter: str | None
    sampling: SamplingParams
    terms: Terms
    samples: tuple[SampleState, ...]

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
                    )
                    for sample in fields["samples"]
                ),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no RequestState: {error!r}") from error


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
