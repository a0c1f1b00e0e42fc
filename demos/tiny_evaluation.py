"""How often a tiny model and its adapters are right, measured through the library.

Reads the files as any user would, and decodes greedily with `punica_jax.generate`:
batches in which rows under all adapters and under none stand mixed.

Knows model directories and words; nothing of training.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import punica_jax as pj
from demos.tiny_tasks import MAX_WORD_LEN, TASKS
from punica_jax.models import MODULE_GROUPS, AdapterReport, read_adapter
from punica_jax.runner import Runner
from punica_jax.tokenizer import Tokenizer

MAX_PROMPT_LEN = MAX_WORD_LEN + 2
# Ten letters in Morse, and the stop token.
MAX_NEW_TOKENS = 5 * MAX_WORD_LEN
# The echo and every task of 50 words.
BATCH_SIZE = 50 * (1 + len(TASKS))


def evaluate(
    path: Path,
    adapters: Mapping[str, Path],
    words: Sequence[str],
    *,
    dtype: Any = jnp.float32,
    implementation: str | None = None,
) -> dict[str, Any]:
    """Answer words with every adapter and with none; return the table.

    Args:
      path: the base model's directory.
      adapters: task -> the adapter's directory, for every task.
      words: what to ask, at most 10 letters each.
      dtype: what the model runs in.
      implementation: see `punica_jax.pallas_kernels.resolve`.

    Returns:
      `num_words`: how many words each share is of; `echo`: the base's share of words
      that come back as they were; `tasks`: task -> its adapter's greatest rank and
      target modules, and the shares of right answers with the adapter (`held_out`) and
      without (`base`).
    """
    model = pj.load_model(path, dtype=dtype, progress=False)
    pools, reports = _load_adapters(model, [adapters[task] for task in TASKS])
    cases = [(word, slot) for word in words for slot in range(-1, len(TASKS))]
    tokenizer = Tokenizer.from_dir(path)
    answers = dict(
        zip(
            cases,
            _generate(model, pools, tokenizer, cases, implementation),
            strict=True,
        )
    )

    def share(task: Callable[[str], str], slot: int) -> float:
        return sum(answers[word, slot] == task(word) for word in words) / len(words)

    tasks = {}
    for slot, (name, task) in enumerate(TASKS.items()):
        modules = {row.module.split(".")[-1] for row in reports[slot].rows}
        tasks[name] = {
            "rank": reports[slot].rank,
            "targets": [m for g in MODULE_GROUPS.values() for m in g if m in modules],
            "held_out": share(task, slot),
            "base": share(task, -1),
        }
    return {"num_words": len(words), "echo": share(str, -1), "tasks": tasks}


def _load_adapters(
    model: pj.Llama, paths: Sequence[Path]
) -> tuple[pj.LoraPools, list[AdapterReport]]:
    """Load adapters into slots 0, 1, ... of fresh pools."""
    loaded = [read_adapter(path, model.config, dtype=model.dtype) for path in paths]
    num_pages = [
        {group: adapter.num_pages(group) for group in MODULE_GROUPS}
        for adapter in loaded
    ]
    runner = Runner(
        model,
        num_kv_pages=1,
        page_size=64,
        num_seats=1,
        num_slots=len(loaded),
        num_rank_pages=max(sum(n[g] for n in num_pages) for g in MODULE_GROUPS),
        max_rank=max(adapter.rank for adapter in loaded),
    )
    first = dict.fromkeys(MODULE_GROUPS, 0)
    for slot, adapter in enumerate(loaded):
        pages = {}
        for group, num in num_pages[slot].items():
            pages[group] = range(first[group], first[group] + num)
            first[group] += num
        assert runner.adapters.write(adapter, pages)
        runner.adapters.show(slot, adapter, pages)
    return runner.adapters.pools, [adapter.report for adapter in loaded]


def _generate(
    model: pj.Llama,
    pools: pj.LoraPools,
    tokenizer: Tokenizer,
    cases: Sequence[tuple[str, int]],
    implementation: str | None,
) -> list[str | None]:
    """Return each case's answer, None where it did not come to an end."""

    @jax.jit
    def generate(model, pools, tokens, lens, slots):
        return pj.generate(
            model,
            pools,
            tokens,
            lens,
            slots,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_ids=sorted(tokenizer.eos_token_ids),
            implementation=implementation,
        )

    answers: list[str | None] = []
    for first in range(0, len(cases), BATCH_SIZE):
        batch = cases[first : first + BATCH_SIZE]
        # Padded to one size, so that there is one program.
        batch = [*batch, *(BATCH_SIZE - len(batch)) * [batch[-1]]]
        prompts = [tokenizer.encode(word) for word, _ in batch]
        tokens = np.zeros((BATCH_SIZE, MAX_PROMPT_LEN), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        lens = np.asarray([len(prompt) for prompt in prompts], np.int32)
        slots = np.asarray([slot for _, slot in batch], np.int32)
        new_tokens, counts = generate(model, pools, tokens, lens, slots)
        for ids, count in zip(np.asarray(new_tokens), np.asarray(counts), strict=True):
            ended = int(ids[count - 1]) in tokenizer.eos_token_ids
            answers.append(tokenizer.decode(ids[:count].tolist()) if ended else None)
    return answers[: len(cases)]
