"""Hypothesis strategies: any model of a family, with any adapters beside it.

Every draw is small, and every adapter binds something.
"""

from typing import Any

from hypothesis import strategies as st

from tests.parity.cases import FUSED_MODULES, MODULES, ModelCase, parent_of

NUM_SEQS = 4
MAX_PROMPT_LEN = 20
# Of a window or a trained length that all sequences stay in.
_ENOUGH = 24
_MAX_LEN = 64
_HEADS = ((1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3))
_RANKS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33)
# The families whose configuration has a `head_dim` beside `hidden_size`.
_FREE_HEAD_DIM = ("llama", "mistral", "qwen3")
_ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_FAMILY_ROPES = {"phi3": ("default", "longrope")}


@st.composite
def _rope_fields(draw: Any, family: str, head_dim: int) -> dict[str, Any]:
    """Draw `rope_parameters`, and for "phi3" what stands beside it."""

    def some(**choices: Any) -> dict[str, Any]:  # each field or none
        return {
            name: draw(st.sampled_from(values))
            for name, values in choices.items()
            if draw(st.booleans())
        }

    rope_type = draw(st.sampled_from(_FAMILY_ROPES.get(family, _ROPES)))
    fields: dict[str, Any] = {
        "rope_type": rope_type,
        "rope_theta": draw(st.sampled_from((100.0, 10000.0, 500000.0))),
    }
    beside = {}
    rotary_dim = head_dim
    if family == "phi3" and draw(st.booleans()):
        fields["partial_rotary_factor"] = 0.5
        rotary_dim //= 2
    if rope_type in ("linear", "dynamic", "llama3", "yarn"):
        fields["factor"] = draw(st.sampled_from((1.5, 4.0, 32.0)))
    if rope_type in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = draw(st.sampled_from((16, 32)))
    if rope_type == "llama3":
        fields["low_freq_factor"] = draw(st.sampled_from((0.5, 1.0)))
        fields["high_freq_factor"] = draw(st.sampled_from((2.0, 4.0)))
    if rope_type == "yarn":
        fields |= some(
            beta_fast=(3.0, 16.0),
            beta_slow=(0.25, 2.0),
            attention_factor=(0.75, 1.5),
            truncate=(False, True),
        )
        if draw(st.booleans()):
            fields |= {"mscale": 0.7, "mscale_all_dim": draw(st.floats(0.5, 1.0))}
    if rope_type == "longrope":
        for name in ("short_factor", "long_factor"):
            factor = st.floats(1.0, 8.0)
            pairs = rotary_dim // 2
            fields[name] = draw(st.lists(factor, min_size=pairs, max_size=pairs))
        fields |= some(attention_factor=(0.75, 1.5))
        # Phi-3 has it beside the table, which transformers fills from there.
        where = beside if family == "phi3" else fields
        where["original_max_position_embeddings"] = _ENOUGH
    return {"rope_parameters": fields, **beside}


@st.composite
def _family_fields(draw: Any, family: str) -> dict[str, Any]:
    """Draw the fields that some families have: biases and windows."""
    fields: dict[str, Any] = {}
    if family in ("llama", "qwen3"):
        fields["attention_bias"] = draw(st.booleans())
    if family == "llama":
        fields["mlp_bias"] = draw(st.booleans())
    if family in ("mistral", "phi3"):
        fields["sliding_window"] = draw(st.sampled_from((None, _ENOUGH)))
    if family in ("qwen2", "qwen3"):
        fields["use_sliding_window"] = draw(st.booleans())
        fields["sliding_window"] = _ENOUGH
        fields["max_window_layers"] = draw(st.integers(0, 2))
    return fields


@st.composite
def _adapters(draw: Any, family: str, num_layers: int) -> dict[str, Any]:
    """Draw the fields of a `LoraConfig`."""
    modules = FUSED_MODULES if family == "phi3" else MODULES
    chosen = draw(st.lists(st.sampled_from(modules), min_size=1, unique=True))
    layers = draw(
        st.lists(st.integers(0, num_layers - 1), min_size=1, unique=True).map(sorted)
    )
    rank = draw(st.sampled_from(_RANKS))
    fields: dict[str, Any] = {
        "r": rank,
        "lora_alpha": draw(st.integers(rank, 3 * rank)),
        "use_rslora": draw(st.booleans()),
    }
    form = draw(st.sampled_from(("names", "layers", "regex", "all-linear")))
    if form == "all-linear":
        chosen = list(modules)
        fields["target_modules"] = "all-linear"
    elif form == "regex":
        numbers = "".join(map(str, layers))
        fields["target_modules"] = rf".*\.[{numbers}]\..*\.({'|'.join(chosen)})"
    else:
        fields["target_modules"] = list(chosen)
        if form == "layers":
            fields["layers_to_transform"] = layers

    def pattern(name: str) -> str:  # in all layers, in one, or in all as a regex
        path = f"{parent_of(name)}.{name}"
        layer = draw(st.sampled_from(layers))
        return draw(st.sampled_from((name, f"layers.{layer}.{path}", rf"\d+\.{path}")))

    if len(chosen) > 1 and draw(st.booleans()):
        excluded = pattern(chosen.pop())
        is_regex = "\\" in excluded
        fields["exclude_modules"] = f".*{excluded}" if is_regex else [excluded]
    if draw(st.booleans()):
        ranks = st.sampled_from((1, 4, 16, 18))
        fields["rank_pattern"] = {pattern(draw(st.sampled_from(chosen))): draw(ranks)}
    if draw(st.booleans()):
        alphas = st.integers(rank, 3 * rank)
        fields["alpha_pattern"] = {pattern(draw(st.sampled_from(chosen))): draw(alphas)}
    return fields


@st.composite
def model_cases(draw: Any, family: str, num_layers: int) -> ModelCase:
    """Draw a model, one to three adapters, and the prompts' lengths."""
    heads, kv_heads = draw(st.sampled_from(_HEADS))
    head_dim = draw(st.sampled_from((8, 16, 24)))
    fields = {
        "vocab_size": 71,
        "hidden_size": heads * head_dim,
        "intermediate_size": draw(st.sampled_from((24, 56))),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": _MAX_LEN,
        "rms_norm_eps": draw(st.sampled_from((1e-6, 1e-3, 1e-2))),
        "tie_word_embeddings": draw(st.booleans()),
        **draw(_rope_fields(family, head_dim)),
        **draw(_family_fields(family)),
    }
    if family in _FREE_HEAD_DIM:
        # transformers wants a multiple of the heads all the same.
        fields |= {"head_dim": head_dim, "hidden_size": draw(st.sampled_from((24, 48)))}
    adapters = draw(st.lists(_adapters(family, num_layers), min_size=1, max_size=3))
    length = st.integers(1, MAX_PROMPT_LEN)
    return ModelCase(
        family=family,
        fields=fields,
        adapters={f"adapter_{index}": item for index, item in enumerate(adapters)},
        prompt_lens=tuple(draw(length) for _ in range(NUM_SEQS)),
        seed=draw(st.integers(0, 2**16)),
    )
