"""Every field of transformers' `GenerationConfig` is known here, used or not."""

import pytest

from punica_jax.generation_config import _ALWAYS, _NEUTRAL, _SAMPLING

pytestmark = pytest.mark.parity

# Ids that the tokenizer reads, and how transformers computes, caches or returns what it
# would generate all the same. The last line's act on beams alone.
HARMLESS = """
    bos_token_id eos_token_id pad_token_id decoder_start_token_id
    _from_model_config transformers_version
    use_cache cache_implementation cache_config max_cache_len low_memory
    compile_config disable_compile continuous_batching_config prefill_chunk_size
    output_attentions output_hidden_states output_scores output_logits
    return_dict_in_generate
    is_assistant num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold assistant_early_exit assistant_lookbehind
    assistant_ensemble_weight target_lookbehind prompt_lookup_num_tokens
    max_matching_ngram_size speculation_type use_mtp
    early_stopping length_penalty
""".split()


def test_every_field_is_known():
    transformers = pytest.importorskip("transformers")
    ours = {*_SAMPLING, *_ALWAYS, *_NEUTRAL, "do_sample", "max_length", *HARMLESS}
    theirs = transformers.GenerationConfig().to_dict().keys()
    assert not theirs - ours
