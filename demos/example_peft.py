"""Train a LoRA with PEFT, then serve it beside others, all in one batch.

    python -m demos.example_peft

PyTorch and PEFT train on the small Llama that ships with punica-jax, an ordinary
Hugging Face directory, and save the adapter as they always do. `llm.load_adapter` reads
that directory while the server is running; nothing is converted and nothing recompiles.

Needs the extra `parity` (torch, transformers, peft). Under a minute on a CPU.
"""

import random
import tempfile
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from peft import (  # pyright: ignore[reportMissingImports]
    LoraConfig,
    get_peft_model,
)
from tokenizers import Tokenizer
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
)

import punica_jax as pj
from punica_jax import tiny

EOS_ID = 257
STEPS, BATCH_SIZE, LEARNING_RATE = 60, 32, 5e-3
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["flask", "garden", "python"]


def task(word: str) -> str:
    """What the new adapter is to learn; the base model echoes the word."""
    return "-".join(word)


def train(path: Path) -> None:
    """Train the adapter with PEFT on random words, and save it to `path`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is too small to share out
    rng = random.Random(0)
    tokenizer = Tokenizer.from_file(str(tiny.model_dir() / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(tiny.model_dir(), dtype=torch.float32)
    config = LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, config)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(weights, LEARNING_RATE)
    for step in range(STEPS):
        words = [
            "".join(rng.choices(LETTERS, k=rng.randint(3, 10)))
            for _ in range(BATCH_SIZE)
        ]
        loss = model(**batch_of(words, tokenizer)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1:3d}  loss {loss.item():.4f}", flush=True)
    model.save_pretrained(str(path))


def batch_of(words: list[str], tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """Return padded tokens, their mask, and labels: only answers count (-100)."""
    tokens, labels = [], []
    for word in words:
        prompt = tokenizer.encode(word).ids
        answer = [
            *tokenizer.encode(task(word), add_special_tokens=False).ids,
            EOS_ID,
        ]
        tokens.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([-100] * len(prompt) + answer))
    pad = torch.nn.utils.rnn.pad_sequence
    masks = [torch.ones_like(row) for row in tokens]
    return {
        "input_ids": pad(tokens, batch_first=True),
        "attention_mask": pad(masks, batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


def main() -> None:
    """Train, load, and answer one batch of mixed adapters."""
    llm = pj.LLM(tiny.model_dir(), adapters=tiny.adapter_dirs(), progress=False)
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder))
        llm.load_adapter("spell", folder)
    print(llm.adapters["spell"].report)

    rows = [(name, word) for word in WORDS for name in ("spell", "upper", "sort", None)]
    names, prompts = zip(*rows, strict=True)
    outs = llm.generate(prompts, adapters=names)
    for (name, word), out in zip(rows, outs, strict=True):
        print(f"{name or '-':8s} {word:10s} {out.text}")


if __name__ == "__main__":
    main()
