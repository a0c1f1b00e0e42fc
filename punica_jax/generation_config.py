"""A checkpoint's `generation_config.json`: how its makers would have it sampled.

Plain Python. The ids that end a text are in the same file; the tokenizer reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from punica_jax.model_dir import ModelDir
from punica_jax.request import SamplingParams

_FILE = "generation_config.json"
_LENGTH = "max_new_tokens"
# While one field is looked at by itself, min_new_tokens has nothing to exceed.
_LONGEST = 2**31 - 1
# transformers' name -> ours. These act only where do_sample is true ...
_SAMPLING = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
# ... and these always.
_ALWAYS = {
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "stop_strings": "stop",
}
# What else changes the tokens of transformers' generate, and the values under which it
# does not.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "bad_words_ids": (),
        "begin_suppress_tokens": (),
        "constraints": (),
        "diversity_penalty": (0.0,),
        "dola_layers": (),
        "encoder_no_repeat_ngram_size": (0,),
        "encoder_repetition_penalty": (1.0,),
        "epsilon_cutoff": (0.0,),
        "eta_cutoff": (0.0,),
        "exponential_decay_length_penalty": (),
        "force_words_ids": (),
        "forced_bos_token_id": (),
        "forced_eos_token_id": (),
        "guidance_scale": (1.0,),
        "max_time": (),
        "min_length": (0,),
        "no_repeat_ngram_size": (0,),
        "num_beam_groups": (1,),
        "num_beams": (1,),
        "num_return_sequences": (1,),
        "penalty_alpha": (0.0,),
        "remove_invalid_values": (False,),
        "renormalize_logits": (False,),
        "sequence_bias": (),
        "suppress_tokens": (),
        "token_healing": (False,),
        "top_h": (1.0,),
        "typical_p": (1.0,),
        "watermarking_config": (),
    }
)
# Those of them that act only where do_sample is true.
_ONLY_SAMPLED = frozenset({"epsilon_cutoff", "eta_cutoff", "top_h", "typical_p"})


class GenerationConfigError(ValueError):
    """A field of a `generation_config.json` breaks its rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """What requests get that say nothing of sampling.

    Attributes:
      sampling: the defaults.
      unused: fields of the file that would change the tokens and are not supported.
    """

    sampling: SamplingParams
    unused: tuple[str, ...] = ()

    @classmethod
    def from_dir(cls, files: ModelDir) -> "GenerationConfig":
        """Read the file; one that is absent, or silent, means `SamplingParams()`.

        As in transformers, a file that does not say `do_sample: true` means greedy,
        whatever its temperature, `top_k`, `top_p` and `min_p`. Where it samples and
        has no `top_k`, there is no such limit, as in vLLM; transformers takes 50.
        `max_length` counts where `max_new_tokens` is absent: as the most new tokens.
        Fields that are null, unknown or have no meaning here are ignored.

        Raises:
          GenerationConfigError: a field breaks its rule; the text names both.
          ModelFileError: the file is malformed.
        """
        given = {k: v for k, v in files.fields(_FILE).items() if v is not None}
        path = files.path / _FILE
        do_sample = given.get("do_sample", False)
        if not isinstance(do_sample, bool):
            raise GenerationConfigError(
                f"{path}: do_sample must be true or false, got {do_sample!r}"
            )
        unused = [
            name
            for name, neutral in _NEUTRAL.items()
            if name in given
            and given[name] not in ([], {}, *neutral)
            and (do_sample or name not in _ONLY_SAMPLED)
        ]
        names = _SAMPLING | _ALWAYS if do_sample else _ALWAYS
        if _LENGTH not in given:
            names = names | {"max_length": _LENGTH}
        values = {}
        for name, ours in names.items():
            if name in given:
                _params(f"{path}: {name}", {_LENGTH: _LONGEST, ours: given[name]})
                values[ours] = given[name]
        if do_sample:
            values.setdefault("temperature", 1.0)
        return cls(sampling=_params(str(path), values), unused=tuple(unused))


def _params(where: str, values: Mapping[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise GenerationConfigError(f"{where}: {error}") from error
