"""punica-jax: many LoRA adapters over one base model, mixed in one batch, in JAX."""

from punica_jax.chat import ChatTemplate
from punica_jax.cluster import Cluster
from punica_jax.consolidation import Consolidate, Load, Move, Need, Spread
from punica_jax.engine import Engine
from punica_jax.engine_config import EngineConfig
from punica_jax.engine_request import EngineClosedError, QueueFullError
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
    Attended,
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
from punica_jax.placements import (
    AdapterCapacityError,
    LoadedAdapter,
    UnknownAdapterError,
)
from punica_jax.policies import FairShare, FirstComeFirstServed, LatencyTargets
from punica_jax.pools import load_adapters
from punica_jax.request import (
    Completion,
    DeadlineError,
    RequestError,
    SamplingParams,
    Terms,
    TokenLogprobs,
)
from punica_jax.request_state import RequestState
from punica_jax.stats import (
    AdapterStats,
    ClusterStats,
    EngineGauges,
    EngineStats,
    Histogram,
    RequestProgress,
)
from punica_jax.stream import Piece, Stream
from punica_jax.tokenizer import Tokenizer, TokenizerError

__all__ = [
    "LLM",
    "AdapterCapacityError",
    "AdapterError",
    "AdapterReport",
    "AdapterStats",
    "Attended",
    "ChatError",
    "ChatTemplate",
    "CheckpointError",
    "Cluster",
    "ClusterStats",
    "Completion",
    "ConfigError",
    "Consolidate",
    "DeadlineError",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineGauges",
    "EngineStats",
    "FairShare",
    "FirstComeFirstServed",
    "GenerationConfigError",
    "Histogram",
    "HubError",
    "LatencyTargets",
    "Llama",
    "LlamaConfig",
    "Load",
    "LoadedAdapter",
    "LoraLinear",
    "LoraPools",
    "ModelFileError",
    "Move",
    "Need",
    "Piece",
    "QueueFullError",
    "RequestError",
    "RequestProgress",
    "RequestState",
    "SamplingParams",
    "Spread",
    "Stream",
    "Terms",
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
