"""What a sequence holds of its adapter, and who is asked for it.

Plain Python: knows names, slots and versions of weights.
"""

from collections.abc import Hashable
from typing import Protocol


class Resident(Protocol):
    """An adapter (or the base alone) that a sequence has claimed.

    Attributes:
      slot: its slot on the device, -1 for the base alone.
      weights: stands for the weights that its rows meet, and for no others ever.
      ready: whether rows may use it in the next step.
      error: what is wrong with it, as far as that is known.
    """

    @property
    def slot(self) -> int: ...

    @property
    def weights(self) -> Hashable: ...

    @property
    def ready(self) -> bool: ...

    @property
    def error(self) -> Exception | None: ...

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

    def release(self, resident: Resident) -> None:
        """Let go of what was claimed."""
        ...

    def forgo(self, name: str) -> None:
        """Take note that nobody wants an adapter now, until it is claimed again."""
        ...
