"""What is resident, as text for people: the lines that `print(llm)` shows.

Knows the bookkeeping of a model that is served; nothing of devices or steps.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

from punica_jax.adapters import AdapterTable
from punica_jax.memory import MemoryPlan, bytes_text
from punica_jax.models import LlamaConfig
from punica_jax.placements import LoadedAdapter
from punica_jax.request import SamplingParams

_MAX_LISTED = 16


def summary(
    *,
    name: str,
    config: LlamaConfig,
    dtype: str,
    plan: MemoryPlan,
    table: AdapterTable,
    programs: Sequence[str],
    sampling: SamplingParams,
    unused: Sequence[str],
    elsewhere: str | None = None,
) -> str:
    """Return the lines, one subject each and one for each adapter.

    Args:
      name: the model's.
      config: its sizes.
      dtype: of its weights, its cache and its adapters.
      plan: who has how many bytes.
      table: the loaded adapters.
      programs: names of the compiled programs.
      sampling: what requests get that say nothing of it.
      unused: fields of `generation_config.json` that are not supported.
      elsewhere: what there is of adapters that are not on the device.
    """
    sizes, device = plan.sizes, plan.device
    full = min(sizes.max_seats, sizes.num_kv_pages // sizes.pages_per_seq)
    total = device.total_bytes
    of_total = "" if total is None else f" of {bytes_text(total)}"
    lines = {
        "model": f"{config.model_type}, {config.num_layers} layers, "
        f"{_count_text(plan.num_params)} parameters, {dtype}, "
        f"{bytes_text(plan.weight_bytes)}",
        "device": f"{device.name}, {bytes_text(plan.total_bytes)}{of_total} reserved",
        "KV cache": f"{sizes.num_kv_pages} pages of {sizes.page_size} tokens, "
        f"{bytes_text(plan.kv_bytes)}: {full} of {sizes.max_seats} seats at the full "
        f"{sizes.max_model_len} tokens",
        "adapters": f"{len(table)} in {sizes.num_slots} slots, ranks up to "
        f"{sizes.max_rank}, {sizes.num_rank_pages} rank pages a group, "
        f"{bytes_text(plan.adapter_bytes)}",
    }
    text = [name]
    for subject, line in lines.items():
        text.append(f"  {subject:10}{line}")
    if elsewhere is not None:
        text.append(f"  {'':10}{elsewhere}")
    loaded = list(table.snapshot().values())
    text += [f"    {_adapter_line(adapter)}" for adapter in loaded[:_MAX_LISTED]]
    if len(loaded) > _MAX_LISTED:
        text.append(f"    and {len(loaded) - _MAX_LISTED} more")
    text.append(f"  {'programs':10}{_programs_line(programs)}")
    text.append(f"  {'sampling':10}{_sampling_line(sampling)}")
    if unused:
        text.append(
            f"  {'':10}generation_config.json also has what is not supported: "
            f"{', '.join(unused)}"
        )
    text.append(
        f"  {'workspace':10}{bytes_text(plan.workspace_bytes)} at most for a step, "
        f"{bytes_text(plan.staging_bytes)} for adapters on their way, "
        f"{bytes_text(plan.seat_bytes)} for the seats' sampling"
    )
    return "\n".join(text)


def _adapter_line(adapter: LoadedAdapter) -> str:
    pages = ", ".join(f"{group} {len(own)}" for group, own in adapter.pages.items())
    # A line break in a name would break the line.
    name = adapter.name if adapter.name.isprintable() else repr(adapter.name)
    return (
        f"{name}: slot {adapter.slot}, rank {adapter.report.rank}, rank pages {pages}"
    )


def _programs_line(programs: Sequence[str]) -> str:
    """Count programs by what comes before the bracket in their names."""
    kinds = Counter(program.partition("[")[0] for program in programs)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{len(programs)} compiled: {listed}"


def _sampling_line(sampling: SamplingParams) -> str:
    """Name what is not as in `SamplingParams()`, and what everybody looks for."""
    shown = ("max_new_tokens", "temperature")
    plain = SamplingParams()
    return ", ".join(
        f"{field.name}={getattr(sampling, field.name)!r}"
        for field in fields(sampling)
        if field.name in shown
        or getattr(sampling, field.name) != getattr(plain, field.name)
    )


def _count_text(number: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.2f} {word}"
    return str(number)
