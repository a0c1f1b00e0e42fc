"""Generate inside your own `jax.jit`: adapters, slots and lengths are data.

    python -m demos.example_generate

`pj.generate` is a pure function of a model, adapters and token arrays. Here it is a
part of somebody's own program, which also marks the answers on the device, as an
evaluation or a reward would. The program is traced once; other prompts, another mix of
adapters, and adapters that were exchanged in their slots run without another compile.

Needs no extra. About half a minute on a CPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

import punica_jax as pj
from punica_jax import tiny

EOS_ID = 257
MAX_PROMPT, MAX_NEW_TOKENS = 16, 32
# Adapter -> what it should answer. The place here is the adapter's slot.
TASKS = {
    "upper": str.upper,
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "twice": lambda word: "".join(letter * 2 for letter in word),
}
num_traces = 0


@jax.jit
def mark_answers(
    model: pj.Llama,
    pools: pj.LoraPools,
    prompts: jax.Array,
    prompt_lens: jax.Array,
    slots: jax.Array,
    wanted: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Answer all prompts in one batch; return the tokens, and which rows are right."""
    global num_traces
    num_traces += 1  # Python runs while JAX traces, never again
    tokens, _ = pj.generate(
        model,
        pools,
        prompts,
        prompt_lens,
        slots,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_ids=(EOS_ID,),
    )
    return tokens, (tokens == wanted).all(axis=1)


def padded(rows: list[list[int]], width: int) -> np.ndarray:
    """Lay token lists out as `i32[rows, width]`, zeros on the right."""
    array = np.zeros((len(rows), width), np.int32)
    for target, row in zip(array, rows, strict=True):
        target[: len(row)] = row
    return array


def main() -> None:
    """Run three mixed batches, and tell how often JAX traced."""
    path = tiny.model_dir()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    model = pj.load_model(path, dtype=jnp.float32, progress=False)
    dirs = tiny.adapter_dirs()

    def run(names: tuple[str, ...], batch: list[tuple[str, str]]) -> None:
        pools = pj.load_adapters(model, [dirs[name] for name in names])
        prompts = [tokenizer.encode(word).ids for _, word in batch]
        wanted = [
            [
                *tokenizer.encode(TASKS[name](word), add_special_tokens=False).ids,
                EOS_ID,
            ]
            for name, word in batch
        ]
        tokens, right = mark_answers(
            model,
            pools,
            padded(prompts, MAX_PROMPT),
            np.asarray([len(prompt) for prompt in prompts], np.int32),
            np.asarray([names.index(name) for name, _ in batch], np.int32),
            padded(wanted, MAX_NEW_TOKENS),
        )
        for (name, word), answer, ok in zip(batch, tokens, right, strict=True):
            text = tokenizer.decode(answer[answer != 0].tolist())
            print(f"{name:8s} {word:10s} {text:16s} {'right' if ok else 'WRONG'}")

    slots = tuple(TASKS)
    run(slots, [("upper", "harbor"), ("sort", "planet"), ("twice", "copper")])
    run(slots, [("reverse", "sun"), ("reverse", "winter"), ("upper", "tin")])
    # The same four adapters, each in another slot: other data, the same program.
    slots = tuple(reversed(TASKS))
    run(slots, [("twice", "zebra"), ("upper", "violet"), ("sort", "banana")])
    print(f"times traced: {num_traces}")


if __name__ == "__main__":
    main()
