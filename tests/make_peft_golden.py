"""Make `tests/golden/peft`: adapters that `peft` saved, and what it made of them.

Needs torch, transformers and peft (and attrs for it), which the tests do not:

    python tests/make_peft_golden.py

Each folder holds one adapter as `save_pretrained` wrote it, and `expected.json`: rank,
scale and norm of the delta of every module, as PEFT computes them.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    initialize_lora_eva_weights,
)
from peft.tuners.lora.config import CordaConfig, EvaConfig, LoraGAConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parent / "golden" / "peft"
# Twelve layers, so that "layers.1" is the beginning of another layer's name.
MODEL = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
SMALL = {"target_modules": ["o_proj"], "layers_to_transform": [3, 4], "r": 2}
CASES = {
    "list": {"target_modules": ["q_proj", "v_proj"], "r": 3, "lora_alpha": 6},
    "default_targets": {"r": 2, "lora_alpha": 5},
    "all_linear": {"target_modules": "all-linear", "r": 2, "lora_alpha": 1},
    "regex": {
        "target_modules": r".*layers\.(1|7)\..*(q|down)_proj",
        "r": 4,
        "lora_alpha": 16,
    },
    "rslora": {
        "target_modules": ["o_proj", "up_proj"],
        "r": 4,
        "lora_alpha": 3,
        "use_rslora": True,
        "layers_to_transform": [0, 11],
    },
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "down_proj"],
        "layers_to_transform": [0, 1, 10, 11],
        "r": 2,
        "lora_alpha": 4,
        "use_rslora": True,
        "rank_pattern": {
            "k_proj": 3,
            r"layers\.1\..*q_proj": 5,
            "^model.layers.1[01].mlp.down_proj": 1,
        },
        "alpha_pattern": {"layers.0.self_attn.q_proj": 7, "self_attn.k_proj": 9},
    },
    "one_layer": {
        "target_modules": ["mlp.gate_proj"],
        "layers_to_transform": 1,
        "layers_pattern": "layers",
        "r": 17,
        "lora_alpha": 17,
    },
    "excluded": {
        "target_modules": ["q_proj", "v_proj", "model.layers.4.mlp.up_proj"],
        "layers_to_transform": [2, 3],
        "exclude_modules": ["layers.3.self_attn.v_proj"],
        "r": 2,
        "lora_alpha": 2,
    },
    "excluded_regex": {
        "target_modules": ["o_proj"],
        "exclude_modules": r".*\.\d\.self_attn\.o_proj",
        "r": 2,
        "lora_alpha": 2,
        "init_lora_weights": "gaussian",
    },
    # PEFT spreads the ranks over the modules, and names each.
    "eva": {
        "target_modules": ["q_proj", "o_proj", "down_proj"],
        "layers_to_transform": [0, 7],
        "r": 4,
        "lora_alpha": 8,
        "init_lora_weights": "eva",
        "eva_config": EvaConfig(tau=0.5),
    },
    "orthogonal": {**SMALL, "init_lora_weights": "orthogonal"},
    "mica": {**SMALL, "init_lora_weights": "mica"},
    # These change the base's weights, and are saved as plain LoRAs of twice the rank.
    "pissa": {**SMALL, "init_lora_weights": "pissa"},
    "corda": {
        **SMALL,
        "init_lora_weights": "corda",
        "corda_config": CordaConfig(corda_method="kpm"),
    },
    "lora_ga": {
        **SMALL,
        "init_lora_weights": "lora_ga",
        "lora_ga_config": LoraGAConfig(),
    },
}
CONVERTED = ("pissa", "corda", "lora_ga")


def make_base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**MODEL))


def make_adapter(base: LlamaForCausalLM, config: LoraConfig) -> PeftModel:
    """Add an adapter to a base, begun as its configuration says."""
    init = config.init_lora_weights
    # For the initialisations that look at data.
    tokens = torch.arange(8 * MODEL["vocab_size"]).reshape(8, -1) * 7 % 15

    @torch.enable_grad()
    def look_at_data() -> None:
        for row in tokens[:, None]:
            base(row, labels=row).loss.backward()

    if init == "corda":
        preprocess_corda(base, config, run_model=look_at_data)
    if init == "lora_ga":
        preprocess_loraga(base, config, train_step=look_at_data)
    model = get_peft_model(base, config)
    if init == "eva":
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        initialize_lora_eva_weights(model, [batch] * 20, show_progress_bar=False)
    return model


def randomise(model: PeftModel, dtype: torch.dtype) -> None:
    """Give A and B random values of a dtype: PEFT starts with B = 0."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=generator)
            parameter.data = values.to(dtype)


def expected_of(model: PeftModel) -> dict[str, dict[str, float]]:
    """Say what PEFT made of each module, the delta materialised."""
    expected = {}
    for name, module in model.base_model.model.named_modules():
        if getattr(module, "r", {}).get("default"):
            delta = module.get_delta_weight("default")
            expected[name] = {
                "rank": module.r["default"],
                "scale": module.scaling["default"],
                "delta_norm": torch.linalg.norm(delta.double()).item(),
            }
    return expected


def main() -> None:
    shutil.rmtree(ROOT, ignore_errors=True)
    for case, fields in CASES.items():
        config = LoraConfig(task_type="CAUSAL_LM", **fields)
        model = make_adapter(make_base(), config)
        with tempfile.TemporaryDirectory() as start:
            options = {}
            if case in CONVERTED:
                model.peft_config["default"].init_lora_weights = True
                model.save_pretrained(start)
                options = {"path_initial_model_for_weight_conversion": start}
            randomise(model, torch.bfloat16 if case == "rslora" else torch.float32)
            model.save_pretrained(ROOT / case, **options)
        (ROOT / case / "README.md").unlink(missing_ok=True)
        (ROOT / case / "adapter_model.safetensors").chmod(0o644)
        model = PeftModel.from_pretrained(make_base(), ROOT / case)
        text = json.dumps(expected_of(model), indent=1)
        (ROOT / case / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
