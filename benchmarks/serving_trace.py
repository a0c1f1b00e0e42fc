"""The workloads of `benchmarks.serving`: how long requests are, and whose they are.

Plain numbers; knows nothing of models, engines or time.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from punica_jax.pallas_kernels.shapes import Popularity, segment_sizes

Law = Literal["zipf", "uniform"]
LAWS: tuple[Law, ...] = ("zipf", "uniform")
ZIPF_EXPONENT = 1.5
# Prompts in the paper: scipy's lognorm(s, loc, scale), clipped.
_SIGMA, _LOC, _SCALE = 0.8, -1.0, 18.0
_SEED = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt of so many tokens, and so many to come.

    Attributes:
      number: fixes the prompt's tokens; no two requests of a run have the same.
      prompt_len: tokens of the prompt.
      num_new: tokens to generate.
      adapter: its adapter's name, None for the base alone.
      tokens: the prompt's, if they were made before they are asked for.
    """

    number: int
    prompt_len: int
    num_new: int
    adapter: str | None
    tokens: tuple[int, ...] | None = None

    def prompt(self, vocab_size: int) -> list[int]:
        """Return its tokens; no two requests begin alike."""
        if self.tokens is not None:
            return list(self.tokens)
        rng = np.random.default_rng((_SEED, self.number))
        return rng.integers(vocab_size, size=self.prompt_len).tolist()

    def with_tokens(self, vocab_size: int) -> "Request":
        """Return it with its prompt made."""
        return dataclasses.replace(self, tokens=tuple(self.prompt(vocab_size)))


def lengths(count: int, max_len: int) -> list[tuple[int, int]]:
    """Draw lengths as for the paper's text generation: of prompts, and of outputs.

    Prompts are log-normal; of both together the length is uniform below `max_len`, but
    for at least one new token.
    """
    rng = np.random.default_rng(_SEED)
    prompts = _SCALE * np.exp(_SIGMA * rng.standard_normal(count)) + _LOC
    prompts = np.clip(prompts.astype(int), 1, max_len - 2)
    totals = rng.integers(0, max_len, count)
    outputs = np.maximum(totals - prompts, 1)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def popular_names(popularity: Popularity | None, count: int) -> list[str | None]:
    """Return whose so many requests are, in a random order; None is nobody's."""
    if popularity is None:
        return [None] * count
    sizes = segment_sizes(popularity, count)
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    return [
        f"a{number}" for number in np.random.default_rng(_SEED).permutation(numbers)
    ]


def drawn_names(law: Law, count: int, num_adapters: int) -> list[str | None]:
    """Draw whose so many requests are, among so many adapters."""
    ranks = np.arange(1, num_adapters + 1)
    weights = ranks**-ZIPF_EXPONENT if law == "zipf" else np.ones(num_adapters)
    rng = np.random.default_rng(_SEED)
    drawn = rng.choice(num_adapters, count, p=weights / weights.sum())
    return [f"a{number}" for number in drawn]


def requests_for(names: Sequence[str | None], max_len: int) -> list[Request]:
    """Return a request for each name, with the paper's lengths."""
    sizes = lengths(len(names), max_len)
    return [
        Request(number=number, prompt_len=prompt_len, num_new=num_new, adapter=name)
        for number, (name, (prompt_len, num_new)) in enumerate(
            zip(names, sizes, strict=True)
        )
    ]


def under_way(requests: Sequence[Request], count: int) -> Iterator[Request]:
    """Yield requests without end, the first `count` of them as if they were under way.

    At a moment long after the start, a request in flight is a long one more likely than
    a short one, and anywhere in its output. What has come of it counts to its prompt.
    """
    rng = np.random.default_rng(_SEED)
    weights = np.asarray([request.num_new for request in requests], float)
    chosen = rng.choice(len(requests), count, p=weights / weights.sum())
    for number, index in enumerate(chosen):
        request = requests[index]
        done = int(rng.integers(request.num_new))
        yield dataclasses.replace(
            request,
            number=number,
            prompt_len=request.prompt_len + done,
            num_new=request.num_new - done,
            # The mix is that of the trace.
            adapter=requests[number % len(requests)].adapter,
        )
    for number, request in enumerate(itertools.cycle(requests[count:] or requests)):
        yield dataclasses.replace(request, number=count + number)
