"""A bfloat16 model's logits beside transformers' and peft's, on one device.

    python -m benchmarks.parity [--shape 7B] [--out results/FILE.jsonl]

A random model and four random adapters are made and saved by transformers and peft and
read by this library, as files of anybody's would be. Sequences under different adapters
run mixed: prefill as one ragged batch, then decode steps, each fed the given tokens
(teacher forcing). How far logits in bfloat16 may lie apart is what transformers itself
shows: the distance between two of its attention implementations, and the distance of
either from the same model in float32. Needs the extra `parity`.
"""

import argparse
import functools
import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from peft import (  # pyright: ignore[reportMissingImports]
    LoraConfig,
    PeftModel,
    get_peft_model,
)
from rich.console import Console
from rich.table import Table
from transformers import (  # pyright: ignore[reportMissingImports]
    LlamaConfig,
    LlamaForCausalLM,
)

import punica_jax as pj
from benchmarks.provenance import Log
from punica_jax.models import CachedAttention, KvCache, Llama, LoraPools, SeqTable
from punica_jax.pallas_kernels import segment_metadata
from punica_jax.pallas_kernels.shapes import MODEL_SHAPES

RANKS = {"r8": 8, "r16": 16, "r40": 40, "r64": 64}
ADAPTERS = (*RANKS, None)
PROMPT_LENS = (96, 33, 64, 17, 80, 50, 1, 96, 71, 40)
DECODE_STEPS = 8
PAGE_SIZE = 64
SEED = 2310_18547
# Ours may be this much noisier, in the root mean square over all logits, than the
# noisier of transformers' two implementations.
MAX_RATIO = 1.25

Logits = list[np.ndarray]  # of each sequence, f32[positions, vocab]


def make_files(root: Path, shape: str, layers: int | None, device: str) -> None:
    """Save a random model and the adapters."""
    sizes = MODEL_SHAPES[shape]
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=layers or sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        max_position_embeddings=2048,
    )
    torch.manual_seed(SEED)
    with torch.device(device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(default)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if not name.endswith("norm.weight"):
                std = 1.0 if "embed_tokens" in name else param.shape[-1] ** -0.5
                param.normal_(0, std)
    model.save_pretrained(root / "model")
    for name, rank in RANKS.items():
        lora = LoraConfig(
            r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        wrapped = get_peft_model(model, lora)
        with torch.no_grad():
            for key, param in wrapped.named_parameters():
                if "lora_" in key:
                    # The product of A and B is about a quarter as strong as its base.
                    width = param.shape[1] if "lora_A" in key else 16 * rank
                    param.normal_(0, width**-0.5)
        wrapped.save_pretrained(str(root / name))
        model = wrapped.unload()


def theirs(root: Path, tokens: Logits, dtype, attention: str, device: str) -> Logits:
    """Return transformers' and peft's logits, each sequence alone."""
    base = LlamaForCausalLM.from_pretrained(
        root / "model", dtype=dtype, attn_implementation=attention, device_map=device
    )
    first, *others = RANKS
    model = PeftModel.from_pretrained(base, root / first, adapter_name=first)
    for name in others:
        model.load_adapter(root / name, adapter_name=name)
    model = model.to(dtype).eval()
    out = []
    with torch.no_grad():
        for index, sequence in enumerate(tokens):
            ids = torch.tensor(sequence[None].astype(np.int64), device=device)
            adapter = ADAPTERS[index % len(ADAPTERS)]
            if adapter is None:
                with model.disable_adapter():
                    logits = model(ids).logits
            else:
                model.set_adapter(adapter)
                logits = model(ids).logits
            out.append(logits[0].float().cpu().numpy())
    del base, model
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    return out


def ours(root: Path, tokens: Logits, dtype) -> Logits:
    """Return this library's logits, all sequences mixed."""
    model = pj.load_model(root / "model", dtype=dtype, progress=False)
    pools = pj.load_adapters(model, [root / name for name in RANKS])
    seqs = len(tokens)
    pages = -(-max(map(len, tokens)) // PAGE_SIZE)
    order = np.random.default_rng(0).permutation(seqs * pages)
    page_table = jnp.asarray(order.reshape(seqs, pages), jnp.int32)
    cache = KvCache.zeros(model.config, seqs * pages, PAGE_SIZE, model.dtype)
    names = list(ADAPTERS)
    slots = [names.index(names[i % len(names)]) for i in range(seqs)]
    slots = [-1 if names[slot] is None else slot for slot in slots]
    lens = np.array([len(sequence) - DECODE_STEPS for sequence in tokens])
    parts: list[Logits] = [[] for _ in tokens]
    firsts, counts = np.zeros(seqs, np.int32), lens
    for _ in range(1 + DECODE_STEPS):
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        rows = np.concatenate(
            [s[f : f + n] for s, f, n in zip(tokens, firsts, counts, strict=True)]
        )
        table = SeqTable(
            page_table=page_table,
            bounds=jnp.asarray(bounds),
            kv_lens=jnp.asarray(firsts + counts, jnp.int32),
        )
        row_slots = jnp.asarray(np.repeat(slots, counts), jnp.int32)
        logits, cache = _step(
            model, pools, cache, table, rows, row_slots, int(counts.max())
        )
        logits = np.asarray(logits)
        for seq in range(seqs):
            parts[seq].append(logits[bounds[seq] : bounds[seq + 1]])
        firsts, counts = firsts + counts, np.ones(seqs, np.int32)
    return [np.concatenate(part) for part in parts]


@functools.partial(jax.jit, static_argnames="max_query_len", donate_argnames="cache")
def _step(
    model: Llama,
    pools: LoraPools,
    cache: KvCache,
    table: SeqTable,
    tokens,
    row_slots,
    max_query_len: int,
):
    rows = tokens.shape[0]
    attend = CachedAttention(cache, table, rows, max_query_len)
    segments = segment_metadata(row_slots, num_slots=pools.num_slots)
    hidden = model(tokens, table.positions(rows), attend, pools, segments)
    return model.logits(hidden), attend.cache


def distance(left: Logits, right: Logits) -> dict[str, float]:
    """Return how far logits lie apart: the root mean square, and the most."""
    gaps = np.concatenate([(a - b).ravel() for a, b in zip(left, right, strict=True)])
    return {
        "rms": float(np.sqrt(np.mean(np.square(gaps, dtype=np.float64)))),
        "max": float(np.abs(gaps).max()),
    }


def agreement(left: Logits, right: Logits) -> float:
    """Return the share of positions with the same most likely token."""
    same = [a.argmax(-1) == b.argmax(-1) for a, b in zip(left, right, strict=True)]
    return float(np.concatenate(same).mean())


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(MODEL_SHAPES), default="7B")
    parser.add_argument("--layers", type=int, help="fewer layers, to try it out")
    Log.add_options(parser)
    args = parser.parse_args(words)
    log = Log(args)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocab_size = MODEL_SHAPES[args.shape].vocab_size
    rng = np.random.default_rng(SEED)
    tokens = [
        rng.integers(0, vocab_size, length + DECODE_STEPS, dtype=np.int32)
        for length in PROMPT_LENS
    ]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_files(root, args.shape, args.layers, device)
        read = functools.partial(theirs, root, tokens, device=device)
        exact = read(torch.float32, "eager")
        logits = {
            "eager": read(torch.bfloat16, "eager"),
            "sdpa": read(torch.bfloat16, "sdpa"),
            "ours": ours(root, tokens, jnp.bfloat16),
        }
    span = float(np.mean([np.ptp(part) for part in exact]))
    pairs = {
        "eager to sdpa": ("eager", "sdpa"),
        "ours to eager": ("ours", "eager"),
        "ours to sdpa": ("ours", "sdpa"),
    }
    gaps = {f"{name} to float32": distance(logits[name], exact) for name in logits}
    gaps |= {key: distance(logits[a], logits[b]) for key, (a, b) in pairs.items()}
    same = {f"{name} to float32": agreement(logits[name], exact) for name in logits}
    same |= {key: agreement(logits[a], logits[b]) for key, (a, b) in pairs.items()}
    noise = max(gaps[f"{name} to float32"]["rms"] for name in ("eager", "sdpa"))
    ratio = gaps["ours to float32"]["rms"] / noise
    table = Table(title=f"{args.shape}, bfloat16, logits' range {span:.2f}")
    for column in ("between", "rms", "max", "same argmax"):
        table.add_column(column, justify="left" if column == "between" else "right")
    for name, gap in gaps.items():
        rms, most = f"{gap['rms']:.4f}", f"{gap['max']:.3f}"
        table.add_row(name, rms, most, f"{100 * same[name]:.1f} %")
    Console(width=100).print(table)
    log.add(
        {
            "benchmark": "parity",
            "shape": args.shape,
            "layers": args.layers or MODEL_SHAPES[args.shape].num_layers,
            "adapters": len(RANKS),
            "range": span,
            "gaps": gaps,
            "same_argmax": same,
            "ratio": ratio,
            "torch": torch.__version__,
        }
    )
    verdict = "within" if ratio <= MAX_RATIO else "BEYOND"
    print(
        f"ours is {ratio:.3f} x as far from float32 as transformers in bfloat16, "
        f"{verdict} {MAX_RATIO}"
    )
    raise SystemExit(ratio > MAX_RATIO)


if __name__ == "__main__":
    main()
