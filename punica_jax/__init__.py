"""punica-jax: many LoRA adapters over one base model, mixed in one batch, in JAX."""

from punica_jax.adapters import (
    AdapterCapacityError,
    LoadedAdapter,
    UnknownAdapterError,
)
from punica_jax.functional import lora
from punica_jax.generate import generate
from punica_jax.llm import LLM
from punica_jax.models import (
    AdapterError,
    AdapterReport,
    CheckpointError,
    ConfigError,
    Llama,
    LlamaConfig,
    LoraLinear,
    LoraPools,
    UnsupportedAdapterError,
    UnsupportedConfigError,
    load_model,
)
from punica_jax.pallas_kernels import pack_adapters, segment_metadata
from punica_jax.pools import load_adapters
from punica_jax.request import Completion, SamplingParams
from punica_jax.tokenizer import TokenizerError

__all__ = [
    "LLM",
    "AdapterCapacityError",
    "AdapterError",
    "AdapterReport",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Llama",
    "LlamaConfig",
    "LoadedAdapter",
    "LoraLinear",
    "LoraPools",
    "SamplingParams",
    "TokenizerError",
    "UnknownAdapterError",
    "UnsupportedAdapterError",
    "UnsupportedConfigError",
    "generate",
    "load_adapters",
    "load_model",
    "lora",
    "pack_adapters",
    "segment_metadata",
]
