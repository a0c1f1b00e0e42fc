"""Text in, text out: prompts under many adapters, answered in mixed batches.

Knows text, names of adapters and the order of steps; what a step computes is the
runner's business, and which sequences run in it the engine's.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Unpack

import jax.numpy as jnp

from punica_jax.adapter_loader import AdapterLoader, adapter_dirs
from punica_jax.base_model import BaseModel
from punica_jax.chat import ChatOptions, ChatTemplate
from punica_jax.engine_config import EngineConfig
from punica_jax.exclusive import Exclusive
from punica_jax.loop import StepLoop
from punica_jax.placements import LoadedAdapter
from punica_jax.progress import answering
from punica_jax.prompts import Prompts
from punica_jax.request import Completion, SamplingParams
from punica_jax.sequence import SequenceState
from punica_jax.stream import Stream
from punica_jax.summary import summary
from punica_jax.transcript import TokenCallback


class LLM:
    """A base model and the LoRA adapters loaded beside it.

    `print(llm)` tells what is resident, and how many bytes each part takes.

    Attributes:
      config: the base model's sizes.
      tokenizer: its tokenizer.
      chat_template: its chat templates.
      max_model_len: most tokens of a sequence, prompt and output.
      default_sampling: what requests get that say nothing of sampling; from the
        checkpoint's `generation_config.json`.
      adapters: the loaded adapters by name.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        *,
        dtype: Any = None,
        max_model_len: int | None = None,
        max_seats: int = 32,
        num_slots: int = 32,
        max_rank: int = 64,
        page_size: int = 64,
        kv_memory: float | None = None,
        adapter_memory: float | None = None,
        implementation: str | None = None,
        progress: bool = True,
    ):
        """Load a Hugging Face model, and adapters from PEFT directories.

        Args:
          model: a directory, or an id of the Hugging Face hub: `org/name` or
            `org/name@revision`. A directory that exists wins.
          adapters: name -> PEFT directory or id, to begin with.
          dtype: float32, bfloat16 or float16, of the weights, the cache and the
            adapters; None means bfloat16; on a CPU float32, and float16 on NVIDIA GPUs
            that have no bfloat16.
          max_model_len: most tokens of a sequence; None means what the model was made
            for, at most 2048.
          max_seats: sequences in flight at one time.
          num_slots: adapters loaded at one time.
          max_rank: greatest rank of an adapter, at most 512.
          page_size: tokens of a KV page, a power of two of at least 16.
          kv_memory: most memory of the KV cache: bytes, or as a float up to 1.0 a
            fraction of the device's. Sequences wait while it is full. None: room for
            `max_seats` sequences of `max_model_len`, as far as the device has it.
          adapter_memory: the same for the adapters. None: room for `num_slots` of
            `max_rank`, and one more, so that any of them can be replaced.
          implementation: see `pallas_kernels.resolve`.
          progress: show progress bars while fetching and loading.

        Raises:
          ValueError: a name, a size or a file breaks a rule, an adapter does not fit
            the model, or all of it does not fit the device. Whatever does not need
            the weights is checked before they are fetched and read.
        """
        base = BaseModel(
            model,
            EngineConfig(
                dtype=dtype,
                max_model_len=max_model_len,
                max_seats=max_seats,
                num_slots=num_slots,
                max_rank=max_rank,
                page_size=page_size,
                kv_memory=kv_memory,
                adapter_memory=adapter_memory,
                implementation=implementation,
                progress=progress,
            ),
        )
        self._base = base
        self.config = base.config
        self.max_model_len = base.sizes.max_model_len
        self.tokenizer = base.tokenizer
        self.default_sampling = base.defaults.sampling
        self._progress = progress
        self._exclusive = Exclusive()
        self._table = base.table()
        # Weights come last: the rest is small, and more likely to be refused.
        folders = adapter_dirs(adapters, base.config, base.sizes, progress=progress)
        self._runner = base.runner()
        self._loop = StepLoop(self._runner, base.sizes, self._table)
        self._loader = AdapterLoader(
            self._runner.adapters, self._table, base.config, base.names
        )
        self._prompts = Prompts(
            self.tokenizer,
            self._table.__getitem__,
            base.config.vocab_size,
            self.max_model_len,
            base.sizes.page_size,
        )
        for name, folder in folders.items():
            self._loader.load(name, folder)

    def __repr__(self) -> str:
        return summary(
            name=f"LLM {self._base.names[0]}",
            config=self.config,
            dtype=jnp.dtype(self._runner.dtype).name,
            plan=self._base.plan,
            table=self._table,
            programs=self.programs,
            sampling=self.default_sampling,
            unused=self._base.defaults.unused,
        )

    @property
    def chat_template(self) -> ChatTemplate:
        return self._base.chat_template

    @chat_template.setter
    def chat_template(self, template: ChatTemplate) -> None:
        if not isinstance(template, ChatTemplate):
            raise ValueError(
                "chat_template must be a ChatTemplate, such as ChatTemplate(text, "
                '{"bos_token": "<s>"}); a text alone is given to `chat` as template=; '
                f"got {template!r}"
            )
        self._base.chat_template = template

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        return MappingProxyType(self._table)

    def warm_up(self) -> None:
        """Compile every program that `generate` can need, before the first prompt."""
        with self._exclusive("warm_up"):
            self._loop.warm_up()

    @property
    def programs(self) -> list[str]:
        """Names of the programs compiled so far."""
        return self._runner.programs

    def load_adapter(
        self, name: str, path: str | os.PathLike[str], *, allow_nan: bool = False
    ) -> LoadedAdapter:
        """Load a PEFT adapter under a name; one loaded under that name is replaced.

        The new weights are complete and checked before any row sees them. Compiles
        nothing.

        Args:
          name: what prompts call it.
          path: the PEFT directory, or an id of the Hugging Face hub.
          allow_nan: accept weights that are not finite.

        Returns:
          The adapter as it is loaded now, with its report.

        Raises:
          HubError: there is no such directory, and it cannot be fetched.
          UnsupportedAdapterError: it uses a PEFT feature that is not supported.
          AdapterError: its files are broken, fit another base, or are not finite.
          AdapterCapacityError: no slot or no pages are free, or its rank is too great.
        """
        with self._exclusive("load_adapter"):
            return self._loader.load(
                name, path, allow_nan=allow_nan, progress=self._progress
            )

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; its slot and pages are free for others.

        Raises:
          UnknownAdapterError: no adapter of that name is loaded.
        """
        with self._exclusive("unload_adapter"):
            self._loader.unload(name)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        adapters: str | Sequence[str | None] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        on_token: TokenCallback | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Answer every prompt under its own adapter, many in one batch.

        Args:
          prompts: texts, lists of token ids, or some of each.
          adapters: one name (or None, the base alone) for all prompts, or one each.
          sampling: one for all prompts, or one each; None is `default_sampling`.
          on_token: called with a completion's place in the list and its newest text,
            as it comes. Where it raises an error, that completion ends with it, and
            the others go on.
          progress: show a progress bar; None means where standard error is a terminal,
            there are several prompts and no `on_token`.

        Returns:
          One completion a prompt, or as many as its `n`, in order.

        Raises:
          ValueError: a prompt is empty, too long or has a token outside the
            vocabulary; an adapter is unknown; lengths differ. Nothing has run then.
          RuntimeError: another call is running, in a thread or around `on_token`.
        """
        if progress is None and on_token is not None:
            progress = False
        with (
            self._running("generate", prompts, adapters, sampling, on_token) as seqs,
            answering(seqs, progress) as show,
        ):
            while self._loop.busy:
                self._loop.step()
                show()
        return [sequence.completion() for sequence in seqs]

    def stream(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        adapters: str | Sequence[str | None] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
    ) -> Stream:
        """Answer as `generate` does, and return the texts piece by piece.

        The pieces of all completions mix, as they come; the last of each carries it.
        The arguments are checked at once. Other calls are refused from this call on
        until the last pieces come, or until the stream is left (`close()`, or a `for`
        loop that ends), which frees everything.

        Args:
          prompts: see `generate`; and so `adapters` and `sampling`.

        Returns:
          An iterator of `Piece`.

        Raises:
          ValueError, RuntimeError: see `generate`.
        """
        return Stream(
            self._loop,
            functools.partial(self._running, "stream", prompts, adapters, sampling),
        )

    def encode_chat(
        self, messages: Sequence[Any], **options: Unpack[ChatOptions]
    ) -> list[list[int]]:
        """Turn conversations into prompts of token ids, by the chat template.

        The template writes the special tokens; the tokenizer adds none.

        Args:
          messages: one conversation or a list; see `ChatTemplate.render`.
          **options: those of `ChatTemplate.render`.

        Returns:
          One list of token ids for each conversation.

        Raises:
          ChatError: a message is malformed, there is no template, or it fails.
        """
        return self._base.encode_chat(messages, **options)

    def chat(
        self,
        messages: Sequence[Any],
        adapters: str | Sequence[str | None] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        on_token: TokenCallback | None = None,
        progress: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]:
        """Answer conversations: `generate` of `encode_chat`.

        Args:
          messages: one conversation or a list; see `ChatTemplate.render`.
          adapters: see `generate`; and so `sampling`, `on_token` and `progress`.
          **options: those of `ChatTemplate.render`.

        Returns:
          A list, also for a single conversation; see `generate`.
        """
        prompts = self.encode_chat(messages, **options)
        return self.generate(
            prompts, adapters, sampling, on_token=on_token, progress=progress
        )

    @contextlib.contextmanager
    def _running(
        self, what: str, prompts: Any, adapters: Any, sampling: Any, on_token: Any
    ) -> Iterator[list[SequenceState]]:
        """Hand checked prompts to the engine; whatever is left of them goes at last."""
        with self._exclusive(what):
            sequences = self._prompts.sequences(
                prompts, adapters, sampling, on_token, default=self.default_sampling
            )
            self._loop.add(sequences)
            try:
                yield sequences
            except GeneratorExit:  # a stream is left between two steps
                self._loop.clear()
                raise
            except BaseException:
                self._loop.reset()
                raise
            self._loop.clear()
