from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from punica_jax.scheduler import schedule


@given(lefts=st.lists(st.integers(1, 50), max_size=12), extra=st.integers(0, 40))
def test_every_step_is_within_its_rows_and_starves_nobody(lefts, extra):
    running = [SimpleNamespace(num_left=left) for left in lefts]
    max_rows = len(running) + extra
    scheduled = schedule(running, max_rows)  # pyright: ignore[reportArgumentType]
    rows = {id(sequence): count for sequence, count in scheduled}
    assert len(rows) == len(scheduled) and sum(rows.values()) <= max_rows
    for sequence in running:
        assert 1 <= rows.get(id(sequence), 1) <= sequence.num_left
        if sequence.num_left == 1:
            assert rows[id(sequence)] == 1
    # The first prompt gets rows whenever decoding leaves any.
    prompts = [sequence for sequence in running if sequence.num_left > 1]
    if prompts and max_rows > len(running) - len(prompts):
        assert rows[id(prompts[0])] >= 1
        unused = max_rows - sum(rows.values())
        assert not unused or all(rows[id(p)] == p.num_left for p in prompts)
