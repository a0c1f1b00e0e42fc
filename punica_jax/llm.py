"""Text in, text out: prompts under many adapters, answered in mixed batches.

Knows text, names of adapters and the order of steps; what a step computes is the
runner's business, and which sequences run in it the engine's.
"""

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from punica_jax.adapters import AdapterTable, LoadedAdapter
from punica_jax.engine import Engine
from punica_jax.models import (
    MODULE_GROUPS,
    AdapterError,
    LlamaConfig,
    load_model,
    read_adapter,
)
from punica_jax.pallas_kernels import resolve
from punica_jax.prompts import Prompts
from punica_jax.request import Completion, SamplingParams
from punica_jax.runner import Runner
from punica_jax.sequence import TokenCallback
from punica_jax.sizes import Sizes
from punica_jax.tokenizer import Tokenizer

_DEFAULT_MAX_MODEL_LEN = 2048


class LLM:
    """A base model and the LoRA adapters loaded beside it.

    Attributes:
      config: the base model's sizes.
      tokenizer: its tokenizer.
      max_model_len: most tokens of a sequence, prompt and output.
      adapters: the loaded adapters by name.
    """

    def __init__(
        self,
        path: str | Path,
        adapters: Mapping[str, str | Path] | None = None,
        *,
        dtype: Any = None,
        max_model_len: int | None = None,
        max_seats: int = 32,
        num_slots: int = 32,
        max_rank: int = 64,
        page_size: int = 64,
        implementation: str | None = None,
        progress: bool = True,
    ):
        """Load a Hugging Face Llama directory, and adapters from PEFT directories.

        Args:
          path: the model's directory.
          adapters: name -> PEFT directory, to begin with.
          dtype: float32, bfloat16 or float16, of the weights, the cache and the
            adapters; None means bfloat16, on a CPU float32.
          max_model_len: most tokens of a sequence; None means what the model was made
            for, at most 2048. The KV cache is `max_seats` times that.
          max_seats: sequences in flight at one time.
          num_slots: adapters loaded at one time.
          max_rank: greatest rank of an adapter, at most 512. The device has room for
            `num_slots` adapters of this rank, and one more, so that any of them can be
            replaced.
          page_size: tokens of a KV page, a power of two of at least 16.
          implementation: see `pallas_kernels.resolve`.
          progress: show a progress bar while loading.

        Raises:
          ValueError: a size or a file breaks a rule, or an adapter does not fit the
            model. Sizes are checked before weights are read.
        """
        implementation = resolve(implementation)
        path = Path(path)
        config = LlamaConfig.from_dir(path, max_model_len=max_model_len)
        if max_model_len is None:
            max_model_len = min(config.max_position_embeddings, _DEFAULT_MAX_MODEL_LEN)
        sizes = Sizes(
            max_model_len=max_model_len,
            max_seats=max_seats,
            num_slots=num_slots,
            max_rank=max_rank,
            page_size=page_size,
        )
        sizes.check_model(config)
        if dtype is None:
            on_cpu = jax.default_backend() == "cpu"
            dtype = jnp.float32 if on_cpu else jnp.bfloat16
        self.config = config
        self.max_model_len = max_model_len
        self.tokenizer = Tokenizer.from_dir(path)
        self._base_name = _base_name(path)
        self._lock = threading.Lock()
        self._table = AdapterTable(
            num_slots, dict.fromkeys(MODULE_GROUPS, sizes.num_rank_pages), max_rank
        )
        self._runner = Runner(
            load_model(
                path, dtype=dtype, max_model_len=max_model_len, progress=progress
            ),
            num_kv_pages=sizes.num_kv_pages,
            page_size=page_size,
            num_slots=num_slots,
            num_rank_pages=sizes.num_rank_pages,
            max_rank=max_rank,
            implementation=implementation,
        )
        self._engine = Engine(self._runner, sizes)
        self._prompts = Prompts(
            self.tokenizer, self._table, config.vocab_size, max_model_len
        )
        for name, adapter_path in (adapters or {}).items():
            self.load_adapter(name, adapter_path)

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        return MappingProxyType(self._table)

    def warm_up(self) -> None:
        """Compile every program that `generate` can need, before the first prompt."""
        with self._exclusive("warm_up"):
            self._engine.warm_up()

    @property
    def programs(self) -> list[str]:
        """Names of the programs compiled so far."""
        return self._runner.programs

    def load_adapter(
        self, name: str, path: str | Path, *, allow_nan: bool = False
    ) -> LoadedAdapter:
        """Load a PEFT directory under a name; one loaded under that name is replaced.

        The new weights are complete and checked before any row sees them. Compiles
        nothing.

        Args:
          name: what prompts call it.
          path: the PEFT directory.
          allow_nan: accept weights that are not finite.

        Raises:
          UnsupportedAdapterError: it uses a PEFT feature that is not supported.
          AdapterError: its files are broken, fit another base, or are not finite.
          AdapterCapacityError: no slot or no pages are free, or its rank is too great.
        """
        adapter = read_adapter(
            path, self.config, dtype=self._runner.dtype, base_name=self._base_name
        )
        num_pages = {group: adapter.num_pages(group) for group in MODULE_GROUPS}
        with self._exclusive("load_adapter"):
            placement = self._table.allocate(name, num_pages, adapter.rank)
            try:
                finite = self._runner.write_adapter(adapter, placement.pages)
                if not finite and not allow_nan:
                    raise AdapterError(
                        f"adapter {name!r} at {path} has weights that are NaN or "
                        "infinite; all must be finite (allow_nan=True loads it all "
                        "the same)"
                    )
                self._runner.show_adapter(placement.slot, adapter, placement.pages)
            except BaseException:
                self._table.cancel(placement)
                raise
            self._table.publish(placement, adapter.report)
        return self._table[name]

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; its slot and pages are free for others.

        Raises:
          UnknownAdapterError: no adapter of that name is loaded.
        """
        with self._exclusive("unload_adapter"):
            self._runner.clear_slot(self._table.free(name).slot)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        adapters: str | Sequence[str | None] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: TokenCallback | None = None,
    ) -> list[Completion]:
        """Answer every prompt under its own adapter, many in one batch.

        Args:
          prompts: texts, or token ids.
          adapters: one name (or None, the base alone) for all prompts, or one each.
          sampling: one for all prompts, or one each.
          on_token: called with a prompt's index and its newest text, as it comes.

        Returns:
          One completion a prompt, in order.

        Raises:
          ValueError: a prompt is empty, too long or has a token outside the
            vocabulary; an adapter is unknown; lengths differ. Nothing has run then.
          RuntimeError: another call is running, in a thread or around `on_token`.
        """
        with self._exclusive("generate"):
            sequences = self._prompts.sequences(prompts, adapters, sampling, on_token)
            self._engine.add(sequences)
            try:
                while self._engine.busy:
                    self._engine.step()
            finally:
                self._engine.clear()
        return [sequence.completion() for sequence in sequences]

    @contextlib.contextmanager
    def _exclusive(self, what: str) -> Iterator[None]:
        # Seats, slots and pages have one user at a time: a call inside another would
        # write over the sequences in flight.
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"{what} was called while another call of this LLM is running; an LLM "
                "takes one call at a time, on_token callbacks included"
            )
        try:
            yield
        finally:
            self._lock.release()


def _base_name(path: Path) -> str:
    """Return what a model is called: by its config, the hub's cache, or its folder."""
    name = json.loads((path / "config.json").read_text()).get("_name_or_path")
    if name:
        return str(name)
    for folder in (path, *path.resolve().parents):
        if folder.name.startswith("models--"):
            return folder.name.removeprefix("models--").replace("--", "/")
    return path.resolve().name
