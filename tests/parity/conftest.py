"""Fixtures of the tests against transformers and PEFT."""

import numpy as np
import pytest

from tests.parity.cases import MODELS, SIZES


@pytest.fixture(scope="session")
def make_reference(tmp_path_factory):
    """Return a function that writes a case to disk: `(case) -> Reference`.

    Torch, transformers and peft are of the extra `parity`: imported here, they are
    needed where these tests run and nowhere else.
    """
    from tests.parity.references import Reference

    return lambda case: Reference(case, tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="session")
def reference_of(make_reference):
    """Return a function that gives the `Reference` of a name in `MODELS`."""
    known = {}

    def reference_of(name):
        if name not in known:
            known[name] = make_reference(MODELS[name])
        return known[name]

    return reference_of


@pytest.fixture(scope="session")
def prompts_of():
    """Return a function that draws a case's prompts: `(case) -> lists of tokens`."""

    def prompts_of(case):
        rng = np.random.default_rng(case.seed)
        vocab_size = case.fields.get("vocab_size", SIZES["vocab_size"])
        return [rng.integers(0, vocab_size, n).tolist() for n in case.prompt_lens]

    return prompts_of
