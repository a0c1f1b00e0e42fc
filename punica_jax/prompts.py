"""What a caller asks for, checked: prompts become sequences.

Plain Python; knows texts, tokens and names of adapters, nothing of devices or steps.
"""

import asyncio
import contextlib
import functools
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence, Set, Sized
from typing import Any

import numpy as np

from punica_jax.request import SamplingParams, Terms, is_integer
from punica_jax.sequence import DEFAULT_TERMS, SequenceState
from punica_jax.tokenizer import Tokenizer

_LONG = 1 << 14  # characters, or tokens, of all samples; milliseconds
_OF_SAMPLE = 128  # what a sample takes beside its tokens: as long as so many


class Prompts:
    """Makes sequences of a model's prompts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        check_adapter: Callable[[str], object],
        vocab_size: int,
        max_model_len: int,
        page_size: int,
        *,
        max_samples: float = math.inf,
    ):
        """Take what prompts are checked by.

        Args:
          tokenizer: the model's.
          check_adapter: raises if no adapter has that name.
          vocab_size: the model's.
          max_model_len: most tokens of a sequence.
          page_size: tokens of a KV page.
          max_samples: most completions of a prompt.
        """
        self._tokenizer = tokenizer
        self._check_adapter = check_adapter
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._page_size = page_size
        self._max_samples = max_samples

    def sequences(
        self,
        prompts: Any,
        adapters: Any,
        sampling: Any,
        on_token: Any,
        *,
        default: SamplingParams,
        terms: Terms = DEFAULT_TERMS,
    ) -> list[SequenceState]:
        """Check the arguments of `LLM.generate` and make its sequences.

        Args:
          prompts: see `LLM.generate`; and so `adapters`, `sampling` and `on_token`.
          default: stands where `sampling` is None, or has None.
          terms: how all of them are treated among others.

        Raises:
          ValueError: one of them breaks its rule.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            raise ValueError(
                "prompts must be a text, or a list of texts or of lists of token ids, "
                f"got {reprlib.repr(prompts)}"
            )
        _check_callback(on_token)
        if not isinstance(terms, Terms):
            raise ValueError(f"terms must be a Terms, got {terms!r}")
        count = len(prompts)
        adapters = _one_each("adapters", adapters, str, count)
        sampling = _one_each("sampling", sampling, SamplingParams, count)
        sampling = [default if params is None else params for params in sampling]
        for index, params in enumerate(sampling):
            if not isinstance(params, SamplingParams):
                raise ValueError(
                    f"sampling {index} must be a SamplingParams, got {params!r}"
                )
            if params.n > self._max_samples:
                raise ValueError(
                    f"n must be at most {self._max_samples} here, got {params.n}"
                )
            self._check_tokens(index, params)
        sequences: list[SequenceState] = []
        for prompt_index, (prompt, adapter, params) in enumerate(
            zip(prompts, adapters, sampling, strict=True)
        ):
            tokens = self._encode(prompt_index, prompt)
            if adapter is not None:
                self._check_adapter(adapter)
            group = object() if params.n > 1 else None
            sequences += [
                SequenceState(
                    index=len(sequences) + sample_index,
                    prompt_index=prompt_index,
                    sample_index=sample_index,
                    prompt=tokens,
                    adapter=adapter,
                    sampling=params,
                    tokenizer=self._tokenizer,
                    max_model_len=self._max_model_len,
                    page_size=self._page_size,
                    on_token=on_token,
                    terms=terms,
                    group=group,
                )
                for sample_index in range(params.n)
            ]
        return sequences

    async def sequences_of_one(
        self, prompt: Any, adapter: Any, sampling: Any, *args: Any, **options: Any
    ) -> list[SequenceState]:
        """Do so for one prompt; if that takes long, beside the event loop."""
        own = ([prompt], adapter, sampling, *args)
        make = functools.partial(self.sequences, *own, **options)
        num_samples = sampling.n if isinstance(sampling, SamplingParams) else 1
        length = len(prompt) if isinstance(prompt, Sized) else 0
        if num_samples * (length + _OF_SAMPLE) > _LONG:
            # Where the interpreter is ending, no thread can be begun.
            with contextlib.suppress(RuntimeError):
                return await asyncio.to_thread(make)
        return make()

    def _check_tokens(self, index: int, params: SamplingParams) -> None:
        """Raise ValueError if a parameter names a token that the model lacks."""
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(params, name) or ():
                if token >= self._vocab_size:
                    raise ValueError(
                        f"sampling {index} has token {token} in {name}; tokens must be "
                        f"from 0 to {self._vocab_size - 1}"
                    )

    def _encode(self, index: int, prompt: str | Sequence[int]) -> list[int]:
        """Return a prompt's token ids, checked."""
        if isinstance(prompt, str):
            tokens = self._tokenizer.encode(prompt) if prompt else []
        # A mapping or a set would be taken for a list of its keys.
        elif isinstance(prompt, bytes | Mapping | Set) or not hasattr(
            prompt, "__iter__"
        ):
            hint = "; one prompt of token ids is passed as [[1, 2, 3]]"
            raise ValueError(
                f"prompt {index} must be a text or a list of token ids, got "
                f"{reprlib.repr(prompt)}{hint if is_integer(prompt) else ''}"
            )
        else:
            is_row = isinstance(prompt, np.ndarray) and prompt.ndim == 1
            tokens = np.asarray(prompt).tolist() if is_row else list(prompt)
        if not tokens:
            raise ValueError(f"prompt {index} is empty; it needs at least one token")
        # All at once: 32 prompts of 512 tokens that come together were launched 10 ms
        # later where each token was looked at by itself.
        are_ints = set(map(type, tokens)) == {int}
        if not (are_ints and min(tokens) >= 0 and max(tokens) < self._vocab_size):
            for token in tokens:
                if not is_integer(token) or not 0 <= token < self._vocab_size:
                    raise ValueError(
                        f"prompt {index} has token {token!r}; tokens must be integers "
                        f"from 0 to {self._vocab_size - 1}"
                    )
        if len(tokens) >= self._max_model_len:
            raise ValueError(
                f"prompt {index} has {len(tokens)} tokens, which leaves no room for a "
                f"new one: max_model_len is {self._max_model_len}; shorten it or raise "
                "max_model_len"
            )
        return tokens if are_ints else [int(token) for token in tokens]


def _check_callback(on_token: Any) -> None:
    if on_token is not None and not callable(on_token):
        raise ValueError(
            "on_token must be a function of a completion's index and its newest text, "
            f"got {on_token!r}"
        )


def _one_each(name: str, values: Any, kind: type, count: int) -> Sequence[Any]:
    """Return one value for each prompt, where one for all of them was given or None."""
    if values is None or isinstance(values, kind):
        return [values] * count
    rule = f"{name} must be one for all prompts or one each"
    if isinstance(values, Sequence) and not isinstance(values, bytes):
        if len(values) == count:
            return values
        raise ValueError(f"{rule}: got {len(values)} for {count} prompts")
    swapped = isinstance(values, SamplingParams)
    hint = "; sampling comes third, or as sampling=" if swapped else ""
    got = repr(values) if swapped else reprlib.repr(values)
    raise ValueError(f"{rule}, a {kind.__name__} or None: got {got}{hint}")
