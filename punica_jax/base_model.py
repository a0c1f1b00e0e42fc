"""A base model and all that serving it needs, in two steps: files first, weights last.

Knows files, sizes and one device; nothing of requests or of how steps follow.
"""

import os
from collections.abc import Sequence
from typing import Any, Unpack

from punica_jax.adapters import AdapterTable
from punica_jax.chat import ChatOptions, ChatTemplate
from punica_jax.engine_config import EngineConfig, checked_config
from punica_jax.generation_config import GenerationConfig
from punica_jax.hub import fetch_weights, local_dir
from punica_jax.memory import DeviceMemory, MemoryPlan, default_device, default_dtype
from punica_jax.model_dir import ModelDir
from punica_jax.models import MODULE_GROUPS, LlamaConfig, load_model, warn_user
from punica_jax.pallas_kernels import Implementation, resolve
from punica_jax.runner import Runner
from punica_jax.sizes import Sizes
from punica_jax.tokenizer import Tokenizer

_DEFAULT_MAX_MODEL_LEN = 2048


class BaseModel:
    """A Hugging Face model, checked and planned; its weights are read by `runner`.

    Attributes:
      names: what it may be called, the best name first.
      config: its sizes.
      sizes: how much of everything there is.
      plan: who gets how many bytes of the device.
      dtype: of weights, cache and adapters.
      tokenizer: its tokenizer.
      chat_template: its chat templates.
      defaults: what its `generation_config.json` says of sampling.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        config: EngineConfig,
        *,
        num_spare: int = 0,
        num_staged: int = 1,
    ):
        """Find a model's files, and check all that needs no weights.

        Args:
          model: a directory, or an id of the Hugging Face hub.
          config: how it is to be served.
          num_spare: see `Sizes`; and so `num_staged`.

        Raises:
          ValueError: a name, a size or a file breaks a rule, or all of it does not fit
            the device.
        """
        config = checked_config(config)
        self._model = model
        device = default_device()
        self._implementation = _resolve_on(device, config.implementation)
        self._progress = config.progress
        self._files = ModelDir(local_dir(model, "model", progress=config.progress))
        self.names = self._files.model_names
        self.config = LlamaConfig.from_hf(
            self._files.config, max_model_len=config.max_model_len
        )
        max_model_len = config.max_model_len
        if max_model_len is None:
            most = self.config.max_position_embeddings
            max_model_len = min(most, _DEFAULT_MAX_MODEL_LEN)
        sizes = Sizes(
            max_model_len=max_model_len,
            max_seats=config.max_seats,
            num_slots=config.num_slots,
            max_rank=config.max_rank,
            page_size=config.page_size,
            max_step_rows=config.max_step_rows,
            num_spare=num_spare,
            num_staged=num_staged,
        )
        sizes.check_model(self.config)
        self.dtype = default_dtype(device) if config.dtype is None else config.dtype
        self.plan = MemoryPlan.of(
            self.config,
            sizes,
            self.dtype,
            DeviceMemory.of(device),
            kv_memory=config.kv_memory,
            adapter_memory=config.adapter_memory,
            implementation=self._implementation,
        )
        self.sizes = self.plan.sizes
        self.tokenizer = Tokenizer.from_dir(self._files)
        self.chat_template = ChatTemplate.from_dir(self._files)
        self.defaults = GenerationConfig.from_dir(self._files)
        if unused := self.defaults.unused:
            warn_user(
                f"generation_config.json of {self.names[0]} has what is not supported "
                f"here, and changes transformers' tokens: {', '.join(unused)}"
            )

    def table(self) -> AdapterTable:
        """Make an empty table of the adapters on the device."""
        sizes = self.sizes
        num_pages = dict.fromkeys(MODULE_GROUPS, sizes.num_rank_pages)
        return AdapterTable(sizes.num_device_slots, num_pages, sizes.max_rank)

    def runner(self) -> Runner:
        """Fetch and read the weights, and put everything on the device."""
        fetch_weights(self._model, self._files.path, progress=self._progress)
        model = load_model(
            self._files.path,
            dtype=self.dtype,
            config=self.config,
            progress=self._progress,
        )
        sizes = self.sizes
        return Runner(
            model,
            num_kv_pages=sizes.num_kv_pages,
            page_size=sizes.page_size,
            num_seats=sizes.max_seats,
            num_slots=sizes.num_device_slots,
            num_rank_pages=sizes.num_rank_pages,
            max_rank=sizes.max_rank,
            implementation=self._implementation,
        )

    def encode_chat(
        self, messages: Sequence[Any], **options: Unpack[ChatOptions]
    ) -> list[list[int]]:
        """Turn conversations into token ids; see `LLM.encode_chat`."""
        return [
            self.tokenizer.encode(text, add_special_tokens=False)
            for text in self.chat_template.render(messages, **options)
        ]


def _resolve_on(device: Any, implementation: str | None) -> Implementation:
    """Return the implementation; a GPU's kernels are refused on any other device."""
    resolved = resolve(implementation)
    if resolved == "pallas_triton" and device.platform != "gpu":
        raise ValueError(
            "implementation 'pallas_triton' needs a GPU, the default device is a "
            f"{device.platform}; take None or 'xla'"
        )
    return resolved
