"""Train the tiny Llama and its eight adapters that ship with punica-jax.

    python -m demos.train_tiny [OUT]

from the repository's root (with the `dev` extra installed) writes into OUT, by default
`build/tiny_llama`, what `punica_jax/tiny_llama` holds: a byte-level Llama in Hugging
Face's format, eight PEFT adapters, and `results.json`, the table of exact matches on
held-out words.

1. The base model learns all tasks at once, told apart by tags: "upper:hello" is
   answered by "HELLO". A word without a tag is echoed.
2. The base is saved in bfloat16, read back and frozen. The eight adapters train
   together on untagged words: every step is one batch in which each sequence has an
   adapter of its own, through `punica_jax.pallas_kernels.lora`, at their true ranks.
3. All files are read back by the library, which answers held-out words greedily, with
   their adapter and without, all in mixed batches.

Words never cross: `tiny_tasks.split_of` sends a word to training, validation or test by
a hash of its letters. Accuracy on validation words ends each stage; the test words are
seen in step 3 alone. The seed fixes the words, the first weights and the batches, which
come from NumPy on the host; what is left to chance is a device's rounding.

About three minutes on one H200. A CPU does the same, slowly: some 5000 steps of 0.6
TFLOP are half a day on two cores. `--smoke` runs the same code in seconds, with sizes
that learn nothing.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from demos.tiny_adapters import AdapterSet, AdapterWeights
from demos.tiny_data import (
    BOS_ID,
    EOS_ID,
    SEQ_LEN,
    adapter_examples,
    base_examples,
    write_json,
    write_text_files,
)
from demos.tiny_evaluation import evaluate
from demos.tiny_recipe import ADAPTERS, FULL, SMOKE, Recipe
from demos.tiny_tasks import TASKS, draw_words
from demos.tiny_training import LogitsOf, train
from punica_jax.models import (
    Llama,
    LlamaConfig,
    dense_causal_attention,
    load_model,
    save_model,
)
from punica_jax.pallas_kernels import segment_metadata

DTYPE = jnp.bfloat16
# A training batch has tens of thousands of rows for eight adapters: long tiles, where
# the kernels run (XLA's form has tiles of its own).
_BLOCK_ROWS = 64
_INIT_STDDEV = 0.03


def train_base(recipe: Recipe, out: Path) -> None:
    """Train the base model on tagged tasks and echo; write it with its tokenizer."""
    model = nnx.eval_shape(lambda: Llama(recipe.config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    rngs = _rngs(recipe, "base")
    weights = train(
        _logits_of_base(graph),
        _init_weights(state, recipe.config, rngs[0]),
        base_examples(draw_words(rngs[1], recipe.num_train_words, "train")),
        base_examples(draw_words(rngs[2], recipe.num_validation_words, "validation")),
        ["echo", *TASKS],
        recipe.base,
        rngs[3],
    )
    weights = jax.tree.map(lambda w: w.astype(DTYPE), weights)
    save_model(nnx.merge(graph, weights), out)
    config_file = out / "config.json"
    fields = json.loads(config_file.read_text(encoding="utf-8"))
    tokens = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    write_json(config_file, fields | tokens)
    write_text_files(out)


def train_adapters(recipe: Recipe, out: Path, implementation: str | None) -> None:
    """Train all adapters together over the base model in `out`; write them there."""
    model = load_model(out, dtype=DTYPE, progress=False)
    base_name = {"base_model_name_or_path": out.resolve().name}
    fields = {name: {**ADAPTERS[name], **base_name} for name in TASKS}
    adapters = AdapterSet(model.config, fields)
    rngs = _rngs(recipe, "adapters")
    weights = train(
        _logits_of_adapters(model, adapters, implementation),
        adapters.init(rngs[0]),
        adapter_examples(draw_words(rngs[1], recipe.num_train_words, "train")),
        adapter_examples(
            draw_words(rngs[2], recipe.num_validation_words, "validation")
        ),
        list(TASKS),
        recipe.adapters,
        rngs[3],
    )
    adapters.save(weights, out / "adapters", DTYPE)


def evaluate_files(
    recipe: Recipe, out: Path, implementation: str | None
) -> dict[str, Any]:
    """Read all files back and measure them on held-out words; write the table."""
    words = draw_words(_rngs(recipe, "test")[0], recipe.num_test_words, "test")
    paths = {name: out / "adapters" / name for name in TASKS}
    results = evaluate(out, paths, words, implementation=implementation)
    write_json(out / "results.json", results)
    return results


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m demos.train_tiny",
        description="Train the tiny Llama and its eight adapters.",
    )
    parser.add_argument(
        "out",
        type=Path,
        nargs="?",
        default=Path("build/tiny_llama"),
        help="directory to write, build/tiny_llama by default",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes, a few steps: learns nothing"
    )
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=("base", "adapters", "evaluate"),
        default=("base", "adapters", "evaluate"),
        help="what to do; the others' results are read from the directory",
    )
    parser.add_argument(
        "--implementation",
        default=None,
        help="of the library's operations: xla, pallas_triton; by default by device",
    )
    args = parser.parse_args(arguments)
    recipe = SMOKE if args.smoke else FULL
    if "base" in args.stages:
        _timed("base", lambda: train_base(recipe, args.out))
    if "adapters" in args.stages:
        _timed(
            "adapters", lambda: train_adapters(recipe, args.out, args.implementation)
        )
    if "evaluate" in args.stages:
        results = _timed(
            "evaluate", lambda: evaluate_files(recipe, args.out, args.implementation)
        )
        print(f"echo: {results['echo']:.1%} of {results['num_words']} words")
        for name, row in results["tasks"].items():
            print(
                f"{name:9s} rank {row['rank']:2d}  with adapter {row['held_out']:6.1%}"
                f"  base {row['base']:6.1%}  {', '.join(row['targets'])}"
            )


def _timed(name: str, stage: Any) -> Any:
    start_s = time.monotonic()
    print(f"{name}: on {jax.devices()[0].device_kind}", flush=True)
    result = stage()
    print(f"{name}: {time.monotonic() - start_s:.1f} s", flush=True)
    return result


def _rngs(recipe: Recipe, stage: str) -> list[np.random.Generator]:
    """Return a stage's four streams: first weights, words, validation words, order."""
    number = ("base", "adapters", "test").index(stage)
    return np.random.default_rng([recipe.seed, number]).spawn(4)


def _init_weights(state: Any, config: LlamaConfig, rng: np.random.Generator) -> Any:
    """Draw the first weights on the host: small normal ones, vectors of ones.

    The last matrix of each residual branch is smaller, by the square root of how many
    branches there are (as in GPT-2).
    """

    def init(path: Any, leaf: Any) -> jax.Array:
        if len(leaf.shape) == 1:
            return jnp.ones(leaf.shape, jnp.float32)
        name = jax.tree_util.keystr(path)
        ends_branch = "'o'" in name or "'down'" in name
        depth = 2 * config.num_layers if ends_branch else 1
        values = rng.normal(0.0, _INIT_STDDEV / depth**0.5, leaf.shape)
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(init, state)


def _logits_of_base(graph: Any) -> LogitsOf:
    def logits_of(weights: Any, tokens: jax.Array, slots: jax.Array) -> jax.Array:
        del slots
        model = nnx.merge(graph, jax.tree.map(lambda w: w.astype(DTYPE), weights))
        return _run(model, tokens)

    return jax.tree_util.Partial(logits_of)


def _logits_of_adapters(
    model: Llama, adapters: AdapterSet, implementation: str | None
) -> LogitsOf:
    graph, frozen = nnx.split(model)

    def logits_of(
        frozen: Any, weights: AdapterWeights, tokens: jax.Array, slots: jax.Array
    ) -> jax.Array:
        segments = segment_metadata(
            jnp.repeat(slots, SEQ_LEN),
            num_slots=len(TASKS),
            block_rows=_BLOCK_ROWS,
            implementation=implementation,
        )
        return _run(
            nnx.merge(graph, frozen),
            tokens,
            adapters.pools(weights, DTYPE),
            segments,
            implementation=implementation,
        )

    return jax.tree_util.Partial(logits_of, frozen)


def _run(model: Llama, tokens: jax.Array, *lora: Any, **options: Any) -> jax.Array:
    """Return `f32[seqs, SEQ_LEN, vocab]` for whole sequences."""
    seqs = tokens.shape[0]
    positions = jnp.tile(jnp.arange(SEQ_LEN, dtype=jnp.int32), seqs)
    attend = dense_causal_attention(SEQ_LEN)
    hidden = model(tokens.reshape(-1), positions, attend, *lora, **options)
    return model.logits(hidden).reshape(seqs, SEQ_LEN, -1)


if __name__ == "__main__":
    main()
