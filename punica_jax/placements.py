"""One adapter's place on the device, and what goes wrong with places.

Plain values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from punica_jax.models._peft import AdapterReport

NO_SLOT = -1
BASE_VERSION = 0  # of the base model without an adapter


class UnknownAdapterError(ValueError, KeyError):
    """A name that no loaded adapter has."""

    __str__ = Exception.__str__  # KeyError's would put the message in quotes


class AdapterCapacityError(ValueError):
    """An adapter does not fit into what is free, or into what there is at all."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Room reserved for one adapter.

    Attributes:
      name: the adapter's.
      slot: from 0.
      pages: module group -> its pages in rank order.
    """

    name: str
    slot: int
    pages: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that rows can use.

    Attributes:
      name: what requests call it.
      slot: its slot, from 0.
      pages: module group -> its pages in rank order.
      report: which modules it changes, and by how much.
      version: stands for these weights and never for others, under this or any name.
    """

    name: str
    slot: int
    pages: Mapping[str, tuple[int, ...]]
    report: "AdapterReport"
    version: int


@dataclass(frozen=True, slots=True)
class Held:
    """A loaded adapter, or the base alone, as rows of a sequence need it.

    Attributes:
      slot: its slot, -1 for the base alone.
      weights: stands for these weights and never for others.
      ready: whether rows can use it; a loaded one always is.
      error: what is wrong with it; nothing is with a loaded one.
    """

    slot: int
    weights: int
    ready: bool = True
    error: None = None

    def verify(self) -> None:
        """Return what is wrong with it: nothing is."""
