"""The models that adapters sit on: configurations, layers, caches, files.

Knows arrays and files; nothing of requests, scheduling or text.
"""

from punica_jax.models._adapter import Adapter
from punica_jax.models._adapter_report import AdapterReport, ReportRow
from punica_jax.models._checkpoint import (
    CheckpointError,
    check_dtype,
    load_model,
    save_model,
)
from punica_jax.models._config import MODULE_GROUPS, MODULE_PATHS, LlamaConfig
from punica_jax.models._hf_fields import ConfigError, UnsupportedConfigError
from punica_jax.models._kv_cache import CachedAttention, KvCache, SeqTable
from punica_jax.models._layers import (
    Attended,
    LoraLinear,
    RMSNorm,
    dense_causal_attention,
)
from punica_jax.models._llama import DecoderLayer, Llama
from punica_jax.models._lora import (
    GroupPools,
    LayerPools,
    LoraPools,
    PoolTables,
    put_slot,
    set_slot,
    slot_tables,
    write_page,
    write_weights,
)
from punica_jax.models._peft import (
    make_adapter,
    read_adapter,
    read_rank,
    save_adapter,
)
from punica_jax.models._peft_config import AdapterError, UnsupportedAdapterError
from punica_jax.models._rank_page import (
    EmptyBuffer,
    HostBuffer,
    PageShape,
    RankPage,
)
from punica_jax.models._rope import RopeScaling
from punica_jax.models._user_warning import warn_user

__all__ = [
    "MODULE_GROUPS",
    "MODULE_PATHS",
    "Adapter",
    "AdapterError",
    "AdapterReport",
    "Attended",
    "CachedAttention",
    "CheckpointError",
    "ConfigError",
    "DecoderLayer",
    "EmptyBuffer",
    "GroupPools",
    "HostBuffer",
    "KvCache",
    "LayerPools",
    "Llama",
    "LlamaConfig",
    "LoraLinear",
    "LoraPools",
    "PageShape",
    "PoolTables",
    "RMSNorm",
    "RankPage",
    "ReportRow",
    "RopeScaling",
    "SeqTable",
    "UnsupportedAdapterError",
    "UnsupportedConfigError",
    "check_dtype",
    "dense_causal_attention",
    "load_model",
    "make_adapter",
    "put_slot",
    "read_adapter",
    "read_rank",
    "save_adapter",
    "save_model",
    "set_slot",
    "slot_tables",
    "warn_user",
    "write_page",
    "write_weights",
]
