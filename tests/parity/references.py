"""What transformers and PEFT make of a case: files on disk, logits, greedy tokens.

Imports torch, so tests import this late: see `conftest.py`. Float32 on the CPU.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from tests.make_golden import randomize
from tests.parity.cases import SIZES, ModelCase

# Two processes of tests share the machine, and the models are tiny.
torch.set_num_threads(1)
logging.disable_progress_bar()
logging.set_verbosity_error()


class Reference:
    """A random model and adapters, saved and read again by their own libraries.

    Attributes:
      path: the model, as transformers' `save_pretrained` wrote it.
      adapter_paths: name -> what PEFT's `save_pretrained` wrote.
    """

    def __init__(self, case: ModelCase, folder: Path):
        generator = torch.Generator().manual_seed(case.seed)
        self.path = folder / "model"
        config = AutoConfig.for_model(case.family, **SIZES | dict(case.fields))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            randomize(model.named_parameters(), generator)
        model.save_pretrained(self.path)
        self._runs: dict[str | None, Any] = {None: self._read()}
        self.adapter_paths: dict[str, Path] = {}
        for name, fields in case.adapters.items():
            path = folder / "adapters" / name
            self._write_adapter(path, fields, generator)
            self.adapter_paths[name] = path
            self._runs[name] = PeftModel.from_pretrained(self._read(), path)

    def logits(self, tokens: Sequence[int], adapter: str | None) -> np.ndarray:
        """Return `f32[len(tokens), vocab]`, under an adapter or None."""
        return _logits(self._runs[adapter], tokens)

    def greedy(
        self, prompt: Sequence[int], adapter: str | None, max_new_tokens: int
    ) -> list[int]:
        """Return the new tokens of transformers' own `generate`."""
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self._runs[adapter].generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
        return out[0, len(prompt) :].tolist()

    def merged_logits(self, tokens: Sequence[int], adapter: str) -> np.ndarray:
        """Return the logits of `merge_and_unload`: one model, no adapter beside it."""
        run = PeftModel.from_pretrained(self._read(), self.adapter_paths[adapter])
        return _logits(run.merge_and_unload(), tokens)

    def plain_rope_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the base's logits as if its rotary form were the default one."""
        config = AutoConfig.from_pretrained(self.path)
        kept = ("rope_theta", "partial_rotary_factor")
        plain = {k: v for k, v in config.rope_parameters.items() if k in kept}
        config.rope_parameters = {"rope_type": "default", **plain}
        return _logits(self._read(config=config), tokens)

    def _read(self, **fields: Any) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(
            self.path, dtype=torch.float32, attn_implementation="eager", **fields
        )

    def _write_adapter(
        self, path: Path, fields: Mapping[str, Any], generator: torch.Generator
    ) -> None:
        config = LoraConfig(task_type="CAUSAL_LM", **fields)
        model = get_peft_model(self._read(), config)
        with torch.no_grad():
            loras = [item for item in model.named_parameters() if "lora_" in item[0]]
            randomize(loras, generator)
        model.save_pretrained(str(path), save_embedding_layers=False)


def _logits(run: Any, tokens: Sequence[int]) -> np.ndarray:
    with torch.inference_mode():
        return run(input_ids=torch.tensor([list(tokens)])).logits[0].numpy()
