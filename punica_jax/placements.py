"""One adapter's name and its place on the device, and what goes wrong with them.

Plain values.
"""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from punica_jax.models import AdapterReport

NO_SLOT = -1
BASE_VERSION = 0  # of the base model without an adapter
_MAX_LISTED = 8


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
      is_replaced: whether its name stands for another one; not while it is held.
    """

    slot: int
    weights: int
    ready: bool = True
    error: None = None
    is_replaced: bool = False

    def verify(self) -> None:
        """Return what is wrong with it: nothing is."""


def check_name(name: Any) -> None:
    """Raise ValueError if an adapter cannot be called so."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"an adapter's name must be a text, not empty, got {name!r}")


def check_sources(adapters: Any) -> None:
    """Raise ValueError if these are not names and where their adapters lie."""
    if not isinstance(adapters, Mapping):
        raise ValueError(
            "adapters must map names to directories or ids of the hub, such as "
            f'{{"legal": "path/to/adapter"}}, got {adapters!r}'
        )
    for name in adapters:
        check_name(name)


def listed_names(names: Collection[str]) -> str:
    """Return names for an error's text, the first few of many."""
    shown = ", ".join(repr(name) for name in itertools.islice(names, _MAX_LISTED))
    rest = len(names) - _MAX_LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown
