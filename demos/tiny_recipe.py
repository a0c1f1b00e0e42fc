"""What the tiny model is and how it is trained: sizes, adapters, schedules, seed.

Knows numbers only; `train_tiny` does the work.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from demos.tiny_data import MAX_MODEL_LEN, VOCAB_SIZE
from demos.tiny_training import Schedule
from punica_jax.models import LlamaConfig

# The harder the task, the higher the rank; alpha is twice the rank but for rsLoRA.
ADAPTERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "upper": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        "twice": {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        },
        "caesar": {
            "r": 12,
            "lora_alpha": 24,
            "target_modules": ["gate_proj", "up_proj", "down_proj"],
        },
        "reverse": {
            "r": 16,
            "lora_alpha": 32,
            "target_modules": ["q_proj", "k_proj", "v_proj"],
        },
        "morse": {
            "r": 20,
            "lora_alpha": 40,
            "target_modules": ["v_proj", "o_proj", "up_proj", "down_proj"],
        },
        "piglatin": {
            "r": 24,
            "lora_alpha": 10,
            "use_rslora": True,
            "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"],
        },
        "sort": {
            "r": 32,
            "lora_alpha": 64,
            "target_modules": r".*\.(q|k|v|o|down)_proj",
        },
        "count": {
            "r": 64,
            "lora_alpha": 128,
            "target_modules": "all-linear",
            "rank_pattern": {r"(k|v)_proj": 32, r"mlp\..*": 16},
            "alpha_pattern": {r"(k|v)_proj": 64, r"mlp\..*": 32},
        },
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides what comes out, but the device's rounding.

    Attributes:
      config: sizes of the base model.
      num_train_words: words for training, each used with every task.
      num_validation_words: words that end a stage.
      num_test_words: held-out words of the final table.
      base: schedule of the base model.
      adapters: schedule of the adapters.
      seed: of every random number.
    """

    config: LlamaConfig
    num_train_words: int
    num_validation_words: int
    num_test_words: int
    base: Schedule
    adapters: Schedule
    seed: int = 0


FULL = Recipe(
    config=LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        max_position_embeddings=MAX_MODEL_LEN,
    ),
    num_train_words=200_000,
    num_validation_words=256,
    num_test_words=500,
    base=Schedule(
        peak_lr=2e-3,
        warmup_steps=300,
        max_hold_steps=5000,
        decay_steps=1500,
        stop_at=0.97,
        batch_size=512,
        weight_decay=0.05,
    ),
    adapters=Schedule(
        peak_lr=2e-3,
        warmup_steps=100,
        max_hold_steps=1500,
        decay_steps=500,
        batch_size=512,
    ),
)
SMOKE = Recipe(
    config=dataclasses.replace(
        FULL.config, hidden_size=32, intermediate_size=64, num_layers=1, head_dim=8
    ),
    num_train_words=200,
    num_validation_words=4,
    num_test_words=2,
    base=Schedule(
        peak_lr=2e-3,
        warmup_steps=2,
        max_hold_steps=4,
        decay_steps=4,
        batch_size=16,
        dispatch_steps=4,
    ),
    adapters=Schedule(
        peak_lr=2e-3,
        warmup_steps=2,
        max_hold_steps=4,
        decay_steps=4,
        batch_size=16,
        dispatch_steps=4,
    ),
)
