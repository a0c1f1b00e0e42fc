"""One adapter in host memory, cut into rank pages, ready to be copied to the device.

Knows tensors by their names; nothing of the files they come from, of the device, or of
slots.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from punica_jax.models._adapter_report import AdapterReport, Row, product_norms
from punica_jax.models._base_modules import BaseModule
from punica_jax.models._config import MODULE_GROUPS, LlamaConfig
from punica_jax.models._peft_binding import Binding
from punica_jax.models._rank_page import EmptyBuffer, HostBuffer, PageShape, RankPage
from punica_jax.pallas_kernels import RANK_PAGE

# Copying waits for memory: more threads than this bring nothing.
_MAX_THREADS = 8
# Values whose norms are computed at one time, in up to 20 bytes each.
_MAX_WIDENED = 1 << 22

# Reads tensors: name -> arrays of its dtype, which its rows fill one after the other.
# Called in several threads, with a layer's tensors each.
ReadInto = Callable[[Mapping[str, Sequence[np.ndarray]]], None]


class _HostPage(NamedTuple):
    """One rank page in host memory."""

    buffer: HostBuffer
    page: RankPage  # the same memory


class _Part(NamedTuple):
    """One module's LoRA: its place in the pages."""

    module: BaseModule
    binding: Binding
    columns: slice  # of its group's b
    a: list[np.ndarray]  # of each page [modules, lanes, d_in]: they use the same one
    b: list[np.ndarray]  # of each page [d_out, lanes]
    is_folded: bool  # whether its b has the scale in it already


class Adapter:
    """One adapter's weights in host memory, cut into rank pages.

    Attributes:
      report: what it binds, of the weights as they are here.
      dtype: of its weights, here and on the device.
      rank: the greatest rank of any module.
    """

    def __init__(
        self,
        config: LlamaConfig,
        bindings: Mapping[BaseModule, Binding],
        dtypes: Mapping[str, np.dtype],
        read_into: ReadInto,
        dtype: np.dtype,
        empty: EmptyBuffer = HostBuffer.empty,
    ) -> None:
        """Read an adapter.

        Args:
          config: the base model's.
          bindings: which tensors are whose.
          dtypes: of each tensor.
          read_into: reads the tensors.
          dtype: of the weights on the device. What overflows it becomes infinite, and
            is found when the page is written there.
          empty: makes the memory of a page.
        """
        self.dtype = dtype
        self.rank = max(binding.rank for binding in bindings.values())
        self._counts = {
            group: np.zeros((config.num_layers, len(modules)), np.int32)
            for group, modules in MODULE_GROUPS.items()
        }
        for module, binding in bindings.items():
            modules = slice(module.index, module.index + module.num_modules)
            count = -(-binding.rank // RANK_PAGE)
            self._counts[module.group][module.layer, modules] = count
        self._shapes = {group: PageShape.of(config, group) for group in MODULE_GROUPS}
        self._pages = {
            group: self._empty_pages(group, empty) for group in MODULE_GROUPS
        }
        parts: list[list[_Part]] = [[] for _ in range(config.num_layers)]
        with np.errstate(over="ignore"):
            for module, binding in bindings.items():
                # Exact in a wider dtype, so the device can multiply by the scale.
                is_folded = not np.can_cast(dtypes[binding.b_name], dtype)
                part = self._part(config, module, binding, is_folded)
                parts[module.layer].append(part)
        fill = functools.partial(self._fill, dtypes=dtypes, read_into=read_into)
        num_threads = min(os.cpu_count() or 1, _MAX_THREADS, len(parts))
        with ThreadPoolExecutor(num_threads, "punica-jax-cut") as threads:
            for _ in threads.map(fill, range(len(parts)), parts):
                pass  # raises what a thread raised
        pages = {group: [page for _, page in own] for group, own in self._pages.items()}
        every = [_measured(part) for own in parts for part in own]
        measure = functools.partial(_measure, pages, every)
        self.report = AdapterReport(self.rank, measure)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the weights take."""
        return sum(buffer.array.nbytes for buffer in self._buffers)

    @property
    def is_locked(self) -> bool:
        """Whether all of that is memory that devices copy from directly."""
        return all(buffer.is_locked for buffer in self._buffers)

    def digest(self) -> str:
        """Return what two adapters share only if their weights are the same."""
        # A tenth of the processor time of hashlib's: 20 ms for 80 MB, beside steps.
        digest = blake3(str(self.dtype).encode())
        for group, pages in self._pages.items():
            digest.update(f"{group} {len(pages)}".encode())
            digest.update(self._counts[group].tobytes())
            for buffer, _ in pages:
                digest.update(buffer.array.view(np.uint8).data)
        return digest.hexdigest(length=16)

    def counts(self, group: str) -> np.ndarray:
        """Return the rank pages that each module uses: `i32[layers, C]`."""
        return self._counts[group].copy()

    def num_pages(self, group: str) -> int:
        """Return the rank pages that the group needs, 0 if it has no LoRA at all."""
        return int(self._counts[group].max())

    def page(self, group: str, index: int) -> RankPage:
        """Return ranks `16 index` to `16 index + 15` of one group, in every layer.

        Args:
          group: the module group.
          index: which page of the adapter, from 0 to `num_pages(group) - 1`.
        """
        return self._pages[group][index].page

    @property
    def _buffers(self) -> list[HostBuffer]:
        """The memory of all pages."""
        return [buffer for pages in self._pages.values() for buffer, _ in pages]

    def buffers(self, group: str) -> list[HostBuffer]:
        """Return the memory of the group's pages, in order; see `PageShape.cut`.

        It is theirs for as long as who asked holds it.
        """
        return [buffer for buffer, _ in self._pages[group]]

    def _empty_pages(self, group: str, empty: EmptyBuffer) -> list[_HostPage]:
        shape, pages = self._shapes[group], []
        for _ in range(self.num_pages(group)):
            buffer = empty(shape.size(self.dtype), self.dtype)
            page = shape.cut(buffer.array)
            page.scale[:] = 1
            pages.append(_HostPage(buffer, page))
        return pages

    def _part(
        self, config: LlamaConfig, module: BaseModule, binding: Binding, is_folded: bool
    ) -> _Part:
        """Find a module's place in the pages, and set its scale there."""
        start = sum(config.d_outs(module.group)[: module.index])
        columns = slice(start, start + module.d_out)
        modules = slice(module.index, module.index + module.num_modules)
        part = _Part(module, binding, columns, [], [], is_folded)
        firsts = range(0, binding.rank, RANK_PAGE)
        pages = self._pages[module.group]
        for (_, page), first in zip(pages, firsts, strict=False):
            lanes = min(binding.rank - first, RANK_PAGE)
            part.a.append(page.a[module.layer, modules, :lanes])
            part.b.append(page.b[module.layer, columns, :lanes])
            if not is_folded:
                page.scale[module.layer, modules] = abs(binding.scale)
        return part

    def _fill(
        self,
        layer: int,
        parts: Sequence[_Part],
        *,
        dtypes: Mapping[str, np.dtype],
        read_into: ReadInto,
    ) -> None:
        """Read a layer's tensors into the pages, cast and cut where they must be."""
        self._clear(layer, parts)
        targets: dict[str, list[np.ndarray]] = {}
        beside: dict[str, np.ndarray] = {}
        for module, (a_name, b_name, rank, _), _, a_pages, b_pages, _ in parts:
            dtype = a_pages[0].dtype
            targets[a_name], targets[b_name] = [page[0] for page in a_pages], b_pages
            if dtypes[a_name] != dtype:
                beside[a_name] = np.empty((rank, module.d_in), dtypes[a_name])
            if dtypes[b_name] != dtype or rank != RANK_PAGE:
                beside[b_name] = np.empty((module.d_out, rank), dtypes[b_name])
        read_into(targets | {name: [array] for name, array in beside.items()})
        with np.errstate(invalid="ignore", over="ignore"):
            for part in parts:
                _finish(part, beside)

    def _clear(self, layer: int, parts: Sequence[_Part]) -> None:
        """Set a layer's pages to zero where its tensors do not cover them."""
        covered = dict.fromkeys(MODULE_GROUPS, 0)
        for module, binding, *_ in parts:
            covered[module.group] += module.num_modules * binding.rank
        for group, pages in self._pages.items():
            if covered[group] < len(MODULE_GROUPS[group]) * RANK_PAGE * len(pages):
                for _, page in pages:
                    page.a[layer].view(np.uint8)[...] = 0
                    page.b[layer].view(np.uint8)[...] = 0


def _finish(part: _Part, beside: Mapping[str, np.ndarray]) -> None:
    """Cast and cut what was read beside the pages."""
    module, (a_name, b_name, _, scale), _, a_pages, b_pages, is_folded = part
    if (a := beside.get(a_name)) is not None:
        for page, rows in zip(a_pages, _by_page(a), strict=True):
            _copy(rows, page[0])
    if module.num_modules > 1:
        for page in a_pages:
            page[1:] = page[:1]
    if (b := beside.get(b_name)) is not None:
        if is_folded:
            b = b.astype(np.float32) * np.float32(scale)
        for page, columns in zip(b_pages, _by_page(b.T), strict=True):
            _copy(columns.T, page)
    if scale < 0 and not is_folded:
        for page in b_pages:  # not the scale, which would give the zeros a sign too
            np.negative(page, out=page)


def _by_page(array: np.ndarray) -> Iterator[np.ndarray]:
    return (array[i : i + RANK_PAGE] for i in range(0, len(array), RANK_PAGE))


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copy, or cast where the dtypes differ."""
    if source.dtype == target.dtype:  # as integers bfloat16 takes a third of the time
        bits = f"u{source.dtype.itemsize}"
        source, target = source.view(bits), target.view(bits)
    target[...] = source


def _measured(part: _Part) -> tuple[Any, ...]:
    """Return what `_measure` needs of a part.

    A plain tuple of numbers and names is nothing that Python's garbage collection has
    to walk through; hundreds of modules of hundreds of adapters would be.
    """
    module, (_, _, rank, scale), columns, _, _, is_folded = part
    place = module.group, module.index, columns.start, columns.stop
    return module.layer, module.name, rank, scale, is_folded, *place


def _measure(
    pages: Mapping[str, Sequence[RankPage]],
    parts: Sequence[tuple[Any, ...]],
    known: Iterable[Row],
) -> Iterator[Row]:
    """Compute what a report says of each module, but for norms that are known.

    Of a module in many layers at once: hundreds of small arrays would each take turns
    of Python's lock from the thread that steps.
    """
    norms = {row[:4]: row[4] for row in known}
    products: dict[tuple[str, int, int, int], np.ndarray] = {}
    for layer, module, rank, scale, is_folded, *place in parts:
        labels = layer, module, rank, scale
        if (norm := norms.get(labels)) is None:
            place = tuple(place)
            if place not in products:
                products[place] = _product_norms(pages, *place)
            norm = float(products[place][layer])
            norm *= 1.0 if is_folded else abs(scale)
        yield *labels, norm


def _product_norms(
    pages: Mapping[str, Sequence[RankPage]],
    group: str,
    index: int,
    start: int,
    end: int,
) -> np.ndarray:
    """Return the norm of a module's `B A` in each layer, of the pages as they lie."""
    a_pages = [page.a[:, index] for page in pages[group]]
    b_pages = [page.b[:, start:end] for page in pages[group]]
    num_values = sum(page[0].size for page in (*a_pages, *b_pages))
    num_layers = max(_MAX_WIDENED // num_values, 1)
    norms = [
        product_norms(
            [page[first : first + num_layers] for page in a_pages],
            [page[first : first + num_layers] for page in b_pages],
        )
        for first in range(0, len(a_pages[0]), num_layers)
    ]
    return np.concatenate(norms)
