"""The bookkeeping of slots and rank pages under any sequence of calls."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from punica_jax.placements import AdapterCapacityError, UnknownAdapterError
from tests.test_adapters import REPORT, state, table

NAMES = st.sampled_from("abcde")
PAGES = st.fixed_dictionaries({"qkv": st.integers(0, 4), "o": st.integers(0, 3)})
RANKS = st.integers(1, 70)


class AnySequence(RuleBasedStateMachine):
    """Allocate, publish, cancel, free in any order, held against a plain model.

    The model knows only who owns how many pages; the table must agree on what fits.
    """

    def __init__(self):
        super().__init__()
        self.adapters = table(num_slots=3, qkv=6, o=4, max_rank=64)
        self.loaded: dict[str, dict[str, int]] = {}
        self.pending = {}

    def fits(self, name, pages, rank) -> bool:
        owners = [*self.loaded.values(), *(p for _, p in self.pending.values())]
        used = {group: sum(owner[group] for owner in owners) for group in pages}
        names = self.loaded.keys() | self.pending.keys()
        return (
            rank <= 64
            and (name in self.loaded or len(names) < 3)
            and all(
                used[group] + pages[group] <= total
                for group, total in (("qkv", 6), ("o", 4))
            )
        )

    @rule(name=NAMES, pages=PAGES, rank=RANKS)
    def allocate(self, name, pages, rank):
        before = state(self.adapters)
        if name in self.pending:
            assert not self.adapters.can_allocate(name, pages, rank)
            with pytest.raises(ValueError, match="is being loaded already"):
                self.adapters.allocate(name, pages, rank)
            assert state(self.adapters) == before
            return
        fits = self.fits(name, pages, rank)
        assert self.adapters.can_allocate(name, pages, rank) == fits
        if fits:
            placement = self.adapters.allocate(name, pages, rank)
            assert {g: len(p) for g, p in placement.pages.items()} == pages
            self.pending[name] = placement, pages
        else:
            with pytest.raises(AdapterCapacityError, match=f"'{name}' does not fit: "):
                self.adapters.allocate(name, pages, rank)
            assert state(self.adapters) == before

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def publish(self, data):
        name = data.draw(st.sampled_from(sorted(self.pending)))
        placement, pages = self.pending.pop(name)
        old = self.adapters.publish(placement, REPORT)
        assert (old is not None) == (name in self.loaded)
        assert self.adapters[name].pages == placement.pages
        self.loaded[name] = pages

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.pending)))
        placement, _ = self.pending.pop(name)
        old = self.adapters.get(name)
        self.adapters.cancel(placement)
        assert self.adapters.get(name) is old

    @rule(name=NAMES)
    def free(self, name):
        before = state(self.adapters)
        if name not in self.loaded:
            with pytest.raises(UnknownAdapterError, match=f"named '{name}' is loaded"):
                self.adapters.free(name)
        elif name in self.pending:
            with pytest.raises(ValueError, match="while it is being replaced"):
                self.adapters.free(name)
        else:
            assert self.adapters.free(name).name == name
            del self.loaded[name]
            return
        assert state(self.adapters) == before

    @invariant()
    def whole(self):
        self.adapters.check_integrity()
        assert self.adapters.keys() == self.loaded.keys()
        slots = [adapter.slot for adapter in self.adapters.values()]
        assert len(set(slots)) == len(slots)

    def teardown(self):
        """Give all back: every slot and page must be free again."""
        for placement, _ in self.pending.values():
            self.adapters.cancel(placement)
        for name in self.loaded:
            self.adapters.free(name)
        self.adapters.check_integrity()
        assert self.adapters.num_free_slots == 3
        assert self.adapters.num_free_pages("qkv") == 6
        assert self.adapters.num_free_pages("o") == 4


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=60, stateful_step_count=25)


@given(st.lists(st.tuples(NAMES, PAGES, st.booleans()), max_size=20))
@settings(max_examples=60)
def test_no_page_has_two_owners(steps):
    adapters = table(num_slots=5, qkv=20, o=15)
    for name, pages, keep in steps:
        if adapters.can_allocate(name, pages, 16):
            adapters.publish(adapters.allocate(name, pages, 16), REPORT)
            if not keep:
                adapters.free(name)
    for group, total in (("qkv", 20), ("o", 15)):
        owned = [page for adapter in adapters.values() for page in adapter.pages[group]]
        assert len(set(owned)) == len(owned)
        assert len(owned) + adapters.num_free_pages(group) == total
