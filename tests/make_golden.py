"""Make `tests/golden/llama`: random models and adapters, and the logits they give.

Needs torch, transformers and peft, which the tests do not:

    python tests/make_golden.py

Each folder holds a model as transformers saved it, adapters as peft saved them, and
`expected.npz`: for a few sequences, the tokens, how many of them are the prompt, the
adapter, and the float32 logits after every token, computed on the CPU.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

ROOT = Path(__file__).parent / "golden" / "llama"
SEED = 2310_18547
NUM_DECODE_STEPS = 4
PROMPT_LENS = (7, 1, 19, 4, 33, 2, 12)

BASE = {
    "vocab_size": 72,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 3.0,
}
# All sequences here are shorter than the trained length: the long ones stay unused.
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.75, 2.5],
    "long_factor": [1.5, 4.0, 9.0, 20.0],
}
# A key is the folder's name; the order gives the seeds, so new ones go to the end.
MODELS = {
    "mha": {"num_key_value_heads": 4},
    "gqa": {},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "rope_llama3": {"rope_parameters": LLAMA3},
    "rope_linear": {"rope_parameters": LINEAR},
    "head_dim": {
        "head_dim": 16,
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 48},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "phi3": {"model_type": "phi3", "pad_token_id": None},
    "rope_yarn": {"rope_parameters": YARN},
    # As Phi-4-mini is: a part of each head is rotated.
    "rope_longrope": {
        "model_type": "phi3",
        "pad_token_id": None,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5},
        "original_max_position_embeddings": 48,
        "sliding_window": 64,
    },
}
# What the weights are rounded to and stored in; the logits are float32 all the same.
STORED = {"mha": torch.float32, "tied": torch.float16}
STORED_BY_DEFAULT = torch.bfloat16
SHARDED = {"gqa": "20KB"}
# Written again as transformers 4 did: rope_theta, and rope_scaling with a "type".
OLD_SPELLING = ("rope_linear", "mqa")

FEW = {
    "qv": {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8},
    "all": {
        "target_modules": "all-linear",
        "r": 3,
        "lora_alpha": 5,
        "use_rslora": True,
    },
}
MANY = FEW | {
    # More than one rank page, and modules of one group that differ in rank.
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "o_proj", "down_proj"],
        "r": 2,
        "lora_alpha": 4,
        "rank_pattern": {"layers.1.self_attn.q_proj": 20, "down_proj": 17},
        "alpha_pattern": {"o_proj": 1, "layers.2.mlp.down_proj": 9},
    },
    "layers": {
        "target_modules": ["gate_proj", "up_proj"],
        "layers_to_transform": [0, 2],
        "r": 16,
        "lora_alpha": 16,
    },
    "regex": {
        "target_modules": r".*\.layers\.[12]\..*\.(v_proj|up_proj)",
        "r": 1,
        "lora_alpha": 2,
    },
}
# Linear layers that are several modules: one A, and a B over all their outputs.
FUSED = {
    "qkv": {"target_modules": ["qkv_proj"], "r": 4, "lora_alpha": 8},
    "all": {
        "target_modules": "all-linear",
        "r": 3,
        "lora_alpha": 5,
        "use_rslora": True,
        "rank_pattern": {"layers.1.mlp.gate_up_proj": 18},
    },
}
ADAPTERS = {"gqa": MANY, "phi3": FUSED, "rope_longrope": FUSED}


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def make_model(name: str, generator: torch.Generator) -> PreTrainedModel:
    """Save a random model, and return it in float32 as saved."""
    fields = BASE | {"model_type": "llama"} | MODELS[name]
    config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    randomize(model.named_parameters(), generator)
    folder = ROOT / name
    model.to(STORED.get(name, STORED_BY_DEFAULT))
    model.save_pretrained(folder, max_shard_size=SHARDED.get(name, "1GB"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name in OLD_SPELLING:
        file = folder / "config.json"
        fields = json.loads(file.read_text())
        rope = fields.pop("rope_parameters")
        fields["rope_theta"] = rope.pop("rope_theta")
        rope_type = rope.pop("rope_type")
        fields["rope_scaling"] = {"type": rope_type, **rope} if rope else None
        fields["torch_dtype"] = fields.pop("dtype")
        file.write_text(json.dumps(fields, indent=2) + "\n")
    return load(folder)


def randomize(
    params: Iterable[tuple[str, torch.Tensor]], generator: torch.Generator
) -> None:
    """Fill named parameters so that every one of them shows in the logits."""
    for name, param in params:
        noise = torch.randn(param.shape, generator=generator)
        if name.endswith("norm.weight"):
            param.copy_(1 + 0.2 * noise)
        elif name.endswith("bias"):
            param.copy_(0.5 * noise)
        elif "embed_tokens" in name:
            param.copy_(noise)
        elif "lora_" in name:
            # The product of A and B is about half as strong as its base.
            rank = min(param.shape)
            width = param.shape[1] if "lora_A" in name else 4 * rank
            param.copy_(noise * width**-0.5)
        else:
            param.copy_(noise * 1.5 * param.shape[1] ** -0.5)


def make_adapter(
    name: str, fields: dict, folder: Path, generator: torch.Generator
) -> None:
    """Save a random adapter for the model of that folder."""
    model = get_peft_model(load(folder), LoraConfig(task_type="CAUSAL_LM", **fields))
    with torch.no_grad():
        loras = [item for item in model.named_parameters() if "lora_" in item[0]]
        randomize(loras, generator)
    config = model.peft_config["default"]
    config.base_model_name_or_path = f"golden/{folder.name}"
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # the same files each run
    target = folder / "adapters" / name
    model.save_pretrained(target, save_embedding_layers=False)
    (target / "README.md").unlink()


def make_expected(
    model: PreTrainedModel, folder: Path, adapters: list[str], rng: np.random.Generator
) -> None:
    """Save tokens and logits of a few sequences, each with one adapter or none."""
    variants = [None, *adapters]
    num_seqs = max(len(variants) + 1, 4)
    arrays = {}
    names = []
    for seq in range(num_seqs):
        adapter = variants[seq % len(variants)]
        length = PROMPT_LENS[seq] + NUM_DECODE_STEPS
        tokens = rng.integers(0, model.config.vocab_size, length, dtype=np.int32)
        runs = model
        if adapter is not None:
            runs = PeftModel.from_pretrained(
                load(folder), folder / "adapters" / adapter
            )
        with torch.no_grad():
            logits = runs(torch.tensor(tokens[None].astype(np.int64))).logits[0]
        arrays[f"tokens_{seq}"] = tokens
        arrays[f"logits_{seq}"] = logits.numpy()
        names.append(adapter or "")
    np.savez_compressed(
        folder / "expected.npz",
        adapters=np.array(names),
        prompt_lens=np.array(PROMPT_LENS[:num_seqs], np.int32),
        **arrays,
    )


def main() -> None:
    torch.set_num_threads(1)
    shutil.rmtree(ROOT, ignore_errors=True)
    for number, name in enumerate(MODELS):
        generator = torch.Generator().manual_seed(SEED + number)
        model = make_model(name, generator)
        adapters = ADAPTERS.get(name, FEW)
        for adapter, fields in adapters.items():
            make_adapter(adapter, fields, ROOT / name, generator)
        rng = np.random.default_rng(SEED + number)
        make_expected(model, ROOT / name, list(adapters), rng)


if __name__ == "__main__":
    main()
