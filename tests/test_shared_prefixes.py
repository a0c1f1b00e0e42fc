"""Prompts that begin alike: pages are shared under the same weights, and only then."""

import pytest

import punica_jax as pj

PROMPT = [256, *range(40)]  # two full pages of 16 tokens and some more
GREEDY = pj.SamplingParams(max_new_tokens=20, ignore_eos=True)


@pytest.fixture
def computed(llm, monkeypatch):
    """The number of rows of every step."""
    rows = []
    launch = llm._runner.launch

    def count(batch, wanted=None, feed=None):
        rows.append(int(batch.seqs.bounds[-1]))
        return launch(batch, wanted, feed)

    monkeypatch.setattr(llm._runner, "launch", count)
    llm._loop.reset()  # no prefix is known
    return rows


def answer(llm, adapter, prompt=PROMPT, sampling=GREEDY):
    [out] = llm.generate([prompt], adapter, sampling)
    llm._loop.scheduler.check_integrity()
    assert llm._loop.pages.num_free == llm._loop.pages.num_pages
    return out


def test_a_known_prefix_is_not_computed_again(llm, computed):
    first = answer(llm, "a")
    assert computed[0] == len(PROMPT)
    computed.clear()
    assert answer(llm, "a") == first
    assert computed[0] == len(PROMPT) - 32

    computed.clear()
    # What was generated is known too: a conversation goes on.
    longer = [*PROMPT, *first.token_ids, 7]
    answer(llm, "a", longer)
    known = (len(PROMPT) + len(first.token_ids) - 1) // 16 * 16
    assert computed[0] == len(longer) - known

    computed.clear()
    other = answer(llm, "a", [*PROMPT[:20], *reversed(PROMPT[20:])])
    assert computed[0] == len(PROMPT) - 16
    assert other.token_ids != first.token_ids


def test_other_weights_share_nothing(llm, checkpoint, computed):
    alone = {}
    for adapter in (None, "a", "b"):
        computed.clear()
        alone[adapter] = answer(llm, adapter)
        assert computed[0] == len(PROMPT)
    assert len({out.token_ids for out in alone.values()}) == 3
    llm.load_adapter("z", checkpoint / "a")
    try:
        computed.clear()
        assert answer(llm, "z").token_ids == alone["a"].token_ids
        assert computed[0] == len(PROMPT)
        # Replaced in place: same name, same slot, other weights.
        llm.load_adapter("z", checkpoint / "b")
        computed.clear()
        assert answer(llm, "z").token_ids == alone["b"].token_ids
        assert computed[0] == len(PROMPT)
    finally:
        llm.unload_adapter("z")


def test_prompt_logprobs_compute_every_row(llm, computed):
    answer(llm, "a")
    computed.clear()
    out = answer(llm, "a", sampling=pj.SamplingParams(prompt_logprobs=1))
    assert computed[0] == len(PROMPT)
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == len(PROMPT)


def test_sequences_in_flight_share_and_give_back_when_left(llm, computed):
    first = answer(llm, "a")
    pages = llm._loop.pages
    stream = llm.stream([PROMPT, PROMPT], "a", GREEDY)
    pieces = [next(stream), next(stream)]
    one, two = llm._loop.scheduler.running
    assert one.pages[:2] == two.pages[:2]
    assert not set(one.pages[2:]) & set(two.pages[2:])
    pages.check_integrity()
    stream.close()
    assert pages.num_free == pages.num_pages
    assert (
        "".join(p.text for p in pieces if p.index == 0)
        == first.text[: sum(len(p.text) for p in pieces if p.index == 0)]
    )
    assert answer(llm, "a") == first


def test_a_failing_callback_leaves_known_prefixes_and_no_page_taken(llm, computed):
    def fail(index, text):
        raise ZeroDivisionError

    want = answer(llm, "b")
    [failed] = llm.generate([PROMPT], "a", GREEDY, on_token=fail)
    assert failed.finish_reason == "error"
    for adapter in "ab":
        computed.clear()
        got = answer(llm, adapter)
        assert computed[0] == len(PROMPT) - 32
    assert got == want


def test_samples_of_one_prompt_compute_it_once(llm, computed):
    sampling = pj.SamplingParams(n=3, temperature=1.0, seed=5, max_new_tokens=4)
    together = llm.generate([PROMPT], "a", sampling)
    # The first alone; then the others' rest beside its first decode row.
    assert computed[:2] == [len(PROMPT), 1 + 2 * (len(PROMPT) - 32)]
    llm._loop.scheduler.check_integrity()
    for j, out in enumerate(together):
        alone = pj.SamplingParams(temperature=1.0, seed=5 + j, max_new_tokens=4)
        assert answer(llm, "a", sampling=alone).token_ids == out.token_ids
