"""200 drawn models with drawn adapters, each against transformers and PEFT."""

import jax
import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings

import punica_jax as pj
from tests.parity.cases import adapter_of_seq
from tests.parity.comparison import TOLERANCE, check_greedy, distance
from tests.parity.ragged import continue_prompts
from tests.parity.strategies import MAX_PROMPT_LEN, NUM_SEQS, model_cases

pytestmark = [
    pytest.mark.parity,
    # Twenty cases are a minute of work, and the cores may be busy.
    pytest.mark.timeout(900),
    # PEFT asks transformers for it; neither is ours.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
NUM_LAYERS = (1, 2)
NUM_CASES = 20  # of each family and each number of layers: 200
MAX_NEW_TOKENS = 3
# An adapter may be on one module of one layer: it shows less than those of all.
SHOWS = 10 * TOLERANCE


@pytest.fixture
def quick_compiler():
    """Compile without optimising; give the options that make a step quicker still.

    The operations are the same, and each case has programs of its own: a second of
    compiling for each in place of three.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield {"xla_cpu_use_fusion_emitters": False}
    jax.config.update("jax_disable_most_optimizations", False)
    # A gigabyte of programs that nobody needs again.
    jax.clear_caches()


@pytest.mark.parametrize("num_layers", NUM_LAYERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_cases(family, num_layers, make_reference, prompts_of, quick_compiler):
    seen = set()

    # Not shrunk: every smaller case that it tried would compile again, for minutes.
    @settings(
        max_examples=NUM_CASES,
        database=None,
        print_blob=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @seed(2310_18547)
    @given(case=model_cases(family, num_layers))
    def check(case):
        assume(repr(case) not in seen)
        seen.add(repr(case))
        check_case(case, make_reference(case), prompts_of(case), quick_compiler)

    check()
    assert len(seen) == NUM_CASES


def check_case(case, reference, prompts, compiler_options):
    model = pj.load_model(reference.path, progress=False)
    pools = pj.load_adapters(model, list(reference.adapter_paths.values()))
    names = list(reference.adapter_paths)
    adapters = adapter_of_seq(case)
    ours = continue_prompts(
        model,
        pools,
        prompts,
        [-1 if name is None else names.index(name) for name in adapters],
        max_new_tokens=MAX_NEW_TOKENS,
        rows=NUM_SEQS * MAX_PROMPT_LEN,
        decode_form=False,
        compiler_options=compiler_options,
    )
    shown = dict.fromkeys(names, 0.0)
    for prompt, adapter, (tokens, logits) in zip(prompts, adapters, ours, strict=True):
        theirs = reference.logits(tokens[:-1], adapter)
        assert distance(logits, theirs) <= TOLERANCE, adapter
        check_greedy(
            prompt,
            tokens[len(prompt) :],
            reference.greedy(prompt, adapter, MAX_NEW_TOKENS),
            lambda text, adapter=adapter: reference.logits(text, adapter),
        )
        if adapter is not None:
            alone = reference.logits(tokens[:-1], None)
            shown[adapter] = max(shown[adapter], distance(alone, theirs))
    assert min(shown.values()) > SHOWS, shown
