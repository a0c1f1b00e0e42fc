"""Logits and greedy tokens of every family against transformers and PEFT.

Files written by these libraries, read by ours through its public functions.
"""

import jax
import numpy as np
import pytest

import punica_jax as pj
from tests.parity.cases import FAMILIES, MAX_LEN, MODELS, adapter_of_seq
from tests.parity.comparison import FAR, TOLERANCE, check_greedy, distance
from tests.parity.ragged import continue_prompts
from tests.tiny_checkpoint import byte_tokenizer

pytestmark = [
    pytest.mark.parity,
    # PEFT asks transformers for it; neither is ours.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

NUM_LOGGED_TOKENS = 4
MAX_NEW_TOKENS = 8


def read_model(case, reference):
    """Return our model, our pools, and the slot of each prompt."""
    model = pj.load_model(reference.path, progress=False)
    pools = pj.load_adapters(model, list(reference.adapter_paths.values()))
    names = list(reference.adapter_paths)
    wanted = adapter_of_seq(case)
    return model, pools, [-1 if name is None else names.index(name) for name in wanted]


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_mixed_batch(name, reference_of, prompts_of):
    case, reference = MODELS[name], reference_of(name)
    prompts = prompts_of(case)
    model, pools, slots = read_model(case, reference)
    ours = continue_prompts(
        model,
        pools,
        prompts,
        slots,
        max_new_tokens=NUM_LOGGED_TOKENS,
        rows=sum(map(len, prompts)) + 3,
        decode_form=name in FAMILIES,
    )
    for prompt, adapter, (tokens, logits) in zip(
        prompts, adapter_of_seq(case), ours, strict=True
    ):
        theirs = reference.logits(tokens[:-1], adapter)
        assert distance(logits, theirs) <= TOLERANCE, (adapter, len(prompt))
        check_greedy(
            prompt,
            tokens[len(prompt) :],
            reference.greedy(prompt, adapter, NUM_LOGGED_TOKENS),
            lambda text, adapter=adapter: reference.logits(text, adapter),
        )
        if adapter is not None:
            merged = reference.merged_logits(tokens[:-1], adapter)
            assert distance(logits, merged) <= TOLERANCE, (adapter, len(prompt))
            # All this could not see an adapter that is next to nothing.
            alone = reference.logits(tokens[:-1], None)
            assert distance(alone, theirs) > FAR, adapter


SCALED = [
    name
    for name, case in MODELS.items()
    if case.fields.get("rope_parameters", {}).get("rope_type", "default")
    not in ("default", "dynamic")
]


@pytest.mark.parametrize("name", SCALED)
def test_rotary_scaling_shows(name, reference_of, prompts_of):
    """Nor could the comparison see a rotary form that did nothing."""
    prompt = max(prompts_of(MODELS[name]), key=len)
    reference = reference_of(name)
    plain, scaled = reference.plain_rope_logits(prompt), reference.logits(prompt, None)
    assert distance(plain, scaled) > FAR


def check_tokens(case, reference, prompts, ours):
    """Check greedy tokens of every prompt, and that the adapters change them."""
    adapters = adapter_of_seq(case)
    changed = 0
    for prompt, adapter, tokens in zip(prompts, adapters, ours, strict=True):
        theirs = reference.greedy(prompt, adapter, MAX_NEW_TOKENS)
        check_greedy(
            prompt,
            tokens,
            theirs,
            lambda text, adapter=adapter: reference.logits(text, adapter),
        )
        changed += theirs != reference.greedy(prompt, None, MAX_NEW_TOKENS)
    assert changed > len(case.adapters) / 2


@pytest.mark.parametrize("name", FAMILIES)
def test_generate(name, reference_of, prompts_of):
    case, reference = MODELS[name], reference_of(name)
    prompts = prompts_of(case)
    model, pools, slots = read_model(case, reference)
    padded = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    generate = jax.jit(pj.generate, static_argnames=("max_new_tokens", "page_size"))
    new_tokens, counts = generate(
        model,
        pools,
        padded,
        np.asarray(case.prompt_lens, np.int32),
        np.asarray(slots, np.int32),
        max_new_tokens=MAX_NEW_TOKENS,
        page_size=16,
    )
    assert (np.asarray(counts) == MAX_NEW_TOKENS).all()
    check_tokens(case, reference, prompts, np.asarray(new_tokens).tolist())


@pytest.mark.parametrize("name", FAMILIES)
def test_llm(name, reference_of, prompts_of):
    case, reference = MODELS[name], reference_of(name)
    prompts = prompts_of(case)
    byte_tokenizer().save(str(reference.path / "tokenizer.json"))
    # One family's prompts find too few seats, and join as others leave; the rest run
    # at once, in half as many programs.
    max_seats = 4 if name == FAMILIES[0] else len(prompts)
    llm = pj.LLM(
        reference.path,
        reference.adapter_paths,
        max_model_len=MAX_LEN,
        max_seats=max_seats,
        num_slots=len(case.adapters),
        page_size=16,
        progress=False,
    )
    completions = llm.generate(
        prompts,
        adapter_of_seq(case),
        pj.SamplingParams(max_new_tokens=MAX_NEW_TOKENS),
    )
    tokens = [list(completion.token_ids) for completion in completions]
    check_tokens(case, reference, prompts, tokens)
