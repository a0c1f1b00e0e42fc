"""Adapters of `adapters_dir`: an engine comes to know one when it is first named.

Knows names and the engine's thread; files are the business of `adapter_sources`.
"""

import asyncio

from punica_jax.adapter_sources import AdapterSources, Reader
from punica_jax.engine_thread import EngineThread
from punica_jax.request import check_flag
from punica_jax.versions import Version


class AdapterFinder:
    """Registers what lies in `adapters_dir`, but for what was unloaded."""

    def __init__(self, sources: AdapterSources, thread: EngineThread):
        self._sources = sources
        self._thread = thread
        self._residence = thread.residence
        self._unloaded: set[str] = set()

    def find(self, name: str) -> None:
        """Look for a name that is not known; in any thread."""
        # What registers it may be on its way: the engine's thread is who refuses it.
        if not isinstance(name, str) or name in self._residence:
            return
        if name not in self._unloaded and (reader := self._sources.find(name)):
            self._thread.do(self._register, name, reader)

    def may_find(self, name: str) -> None:
        """Take note that a name that was unloaded is wanted again."""
        self._unloaded.discard(name)

    async def pin(self, name: str, is_pinned: bool) -> None:
        """Have the thread pin an adapter, known or to be found, or let it go.

        Raises:
          UnknownAdapterError: no adapter has that name.
          ValueError: `is_pinned` is neither True nor False.
        """
        check_flag("is_pinned", is_pinned)
        self.find(name)
        await self._thread.ask(self._residence.pin, name, is_pinned)

    async def unload(self, name: str, *, cancel: bool) -> None:
        """Have the thread unload an adapter, never to be found again; wait until it is.

        Args:
          name: the adapter's, known or to be found.
          cancel: see `EngineThread.unload`.

        Raises:
          UnknownAdapterError: no adapter has that name.
          ValueError: `cancel` is neither True nor False.
        """
        check_flag("cancel", cancel)
        self.find(name)
        can_be_found = self._sources.find(name) is not None
        unload = self._thread.ask(self._unload, name, cancel, can_be_found)
        await asyncio.wrap_future((await unload).gone)

    def _unload(self, name: str, cancel: bool, can_be_found: bool) -> Version:
        version = self._thread.requests.unload(name, cancel)
        if can_be_found:
            self._unloaded.add(name)
        return version

    def _register(self, name: str, reader: Reader) -> None:
        if name not in self._residence and name not in self._unloaded:
            self._residence.register(name, *reader)
