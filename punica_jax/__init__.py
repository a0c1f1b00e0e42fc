"""punica-jax: many LoRA adapters over one base model, mixed in one batch, in JAX."""

from punica_jax.adapters import (
    AdapterCapacityError,
    LoadedAdapter,
    UnknownAdapterError,
)
from punica_jax.chat import ChatTemplate
from punica_jax.functional import lora
from punica_jax.generation import generate
from punica_jax.generation_config import GenerationConfigError
from punica_jax.hub import HubError
from punica_jax.llm import LLM
from punica_jax.messages import ChatError
from punica_jax.model_dir import ModelFileError
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
from punica_jax.request import Completion, SamplingParams, TokenLogprobs
from punica_jax.stream import Piece, Stream
from punica_jax.tokenizer import Tokenizer, TokenizerError

__all__ = [
    "LLM",
    "AdapterCapacityError",
    "AdapterError",
    "AdapterReport",
    "ChatError",
    "ChatTemplate",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "GenerationConfigError",
    "HubError",
    "Llama",
    "LlamaConfig",
    "LoadedAdapter",
    "LoraLinear",
    "LoraPools",
    "ModelFileError",
    "Piece",
    "SamplingParams",
    "Stream",
    "TokenLogprobs",
    "Tokenizer",
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
