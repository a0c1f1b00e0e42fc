"""What a sequence holds of its adapter, and who is asked for it.

Plain Python: knows sequences, names, slots and versions of weights.
"""

import collections
from collections.abc import Hashable, Iterable
from typing import Protocol

from punica_jax.sequence import SequenceState


class Resident(Protocol):
    """An adapter (or the base alone) that a sequence has claimed.

    Attributes:
      slot: its slot on the device, -1 for the base alone.
      weights: stands for the weights that its rows meet, and for no others ever.
      ready: whether rows may use it in the next step.
      error: what is wrong with it, as far as that is known.
      is_replaced: whether its name stands for others by now, or for none.
    """

    @property
    def slot(self) -> int: ...

    @property
    def weights(self) -> Hashable: ...

    @property
    def ready(self) -> bool: ...

    @property
    def error(self) -> Exception | None: ...

    @property
    def is_replaced(self) -> bool: ...

    def verify(self) -> Exception | None:
        """Return what is wrong with it, once a step with such rows is through."""
        ...


class Adapters(Protocol):
    """Who can be asked for adapters."""

    def claim(self, name: str | None) -> Resident | None:
        """Hold an adapter on the device, or have it brought there.

        Returns:
          What holds it until it is released; None while there is no room for it.

        Raises:
          ValueError: it can never be had.
        """
        ...

    def is_here(self, name: str | None) -> bool:
        """Tell whether a claim takes no room: it is on the device or on its way."""
        ...

    def lacks_room(self, name: str | None) -> bool:
        """Tell whether room is what the last claim lacked; else it is being read."""
        ...

    def share(self, resident: Resident) -> Resident:
        """Hold once more what is held, whatever its name stands for now."""
        ...

    def release(self, resident: Resident) -> None:
        """Let go of what was claimed or shared."""
        ...

    def forgo(self, name: str) -> None:
        """Take note that nobody wants an adapter now, until it is claimed again."""
        ...


class Claims:
    """What each sequence holds of its adapter.

    Samples of one prompt hold the same weights: those that the first to sit began with,
    whatever their name stands for when the others' turn comes.
    """

    def __init__(self, adapters: Adapters):
        self._adapters = adapters
        self._held: dict[SequenceState, Resident] = {}
        self._num_naming: collections.Counter[str] = collections.Counter()
        self._num_in_group: collections.Counter[Hashable] = collections.Counter()
        self._of_group: dict[Hashable, Resident] = {}  # from its first seat

    def add(self, sequence: SequenceState) -> None:
        """Take note of a sequence that has come; it holds nothing."""
        if sequence.adapter is not None:
            self._num_naming[sequence.adapter] += 1
        if sequence.group is not None:
            self._num_in_group[sequence.group] += 1

    def remove(self, sequence: SequenceState) -> None:
        """Forget a sequence, and let go of what nobody else holds."""
        self.let_go(sequence)
        if (name := sequence.adapter) is not None:
            self._num_naming[name] -= 1
            if not self._num_naming[name]:
                del self._num_naming[name]
                self._adapters.forgo(name)
        if (group := sequence.group) is not None:
            self._num_in_group[group] -= 1
            if not self._num_in_group[group]:
                del self._num_in_group[group]
                if (resident := self._of_group.pop(group, None)) is not None:
                    self._adapters.release(resident)

    def get(self, sequence: SequenceState) -> Resident | None:
        """Return what a sequence holds."""
        return self._held.get(sequence)

    def claim(self, sequence: SequenceState, may_bring: bool) -> Resident | None:
        """Return what a sequence holds, claiming it if it is here or may be brought.

        One that has not begun, here or elsewhere, gets what its name stands for now.
        The sequence fails if it can never be had.
        """
        resident = self._held.get(sequence)
        if resident is not None and resident.is_replaced:
            goes_on = sequence.num_replayed or sequence.adapter_digest
            if not (self.has_begun(sequence) or goes_on):
                self.let_go(sequence)
                resident = None
        if sequence.group in self._of_group:
            own = self._of_group[sequence.group]
            if resident is not own:
                self.let_go(sequence)
                resident = self._held[sequence] = self._adapters.share(own)
        if resident is None and (may_bring or self._adapters.is_here(sequence.adapter)):
            try:
                resident = self._adapters.claim(sequence.adapter)
            except ValueError as error:
                sequence.fail(error)
            if resident is not None:
                self._held[sequence] = resident
        if resident is not None and resident.error is not None:
            sequence.fail(resident.error)
        return resident

    def lacks_room(self, sequence: SequenceState) -> bool:
        """Tell whether room is what its last claim lacked; else it is being read."""
        return self._adapters.lacks_room(sequence.adapter)

    def begin(self, sequence: SequenceState) -> None:
        """Take note that a sequence sits: the weights of its group are its own."""
        if sequence.group is not None and sequence.group not in self._of_group:
            resident = self._adapters.share(self._held[sequence])
            self._of_group[sequence.group] = resident

    def has_begun(self, sequence: SequenceState) -> bool:
        """Tell whether its weights are chosen: it must get on with what it holds."""
        return sequence.weights is not None or sequence.group in self._of_group

    def let_go(self, sequence: SequenceState) -> None:
        """Have a sequence hold nothing."""
        if (resident := self._held.pop(sequence, None)) is not None:
            self._adapters.release(resident)

    def check_integrity(
        self, sequences: Iterable[SequenceState], running: Iterable[SequenceState]
    ) -> None:
        """Assert that those who hold something are those who should."""
        sequences = set(sequences)
        assert self._held.keys() <= sequences
        assert self._held.keys() >= set(running)
        names = (sequence.adapter for sequence in sequences)
        assert self._num_naming == collections.Counter(filter(None, names))
        groups = (sequence.group for sequence in sequences)
        assert self._num_in_group == collections.Counter(filter(None, groups))
        assert self._of_group.keys() <= self._num_in_group.keys()
