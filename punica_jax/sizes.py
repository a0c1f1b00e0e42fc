"""How much of everything there is: sequences, adapters, pages.

Plain numbers, checked before anything touches a device.
"""

from dataclasses import dataclass, fields

from punica_jax.models import MODULE_GROUPS, LlamaConfig
from punica_jax.pallas_kernels import RANK_PAGE
from punica_jax.request import is_integer

MAX_RANK = 512
_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a model is served with.

    Attributes:
      max_model_len: most tokens of a sequence, prompt and output.
      max_seats: sequences in flight at one time.
      num_slots: adapters loaded at one time.
      max_rank: greatest rank of an adapter, at most 512.
      page_size: tokens of a KV page, a power of two of at least 16.
      max_step_rows: most rows of a step, where that is more than `max_seats`.
      num_spare: slots beside those, for what is to replace an adapter in use.
      num_staged: most adapters that lie beside the pools, on their way there.
      max_kv_pages: most KV pages, None for as many as all seats can use.
      max_rank_pages: most rank pages of a group, None for as many as all slots can use.

    Raises:
      ValueError: a size breaks its rule.
    """

    max_model_len: int
    max_seats: int
    num_slots: int
    max_rank: int
    page_size: int
    max_step_rows: int = 2048
    num_spare: int = 0
    num_staged: int = 1
    max_kv_pages: int | None = None
    max_rank_pages: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.default is None and getattr(self, field.name) is None:
                continue
            value, least = getattr(self, field.name), int(field.name != "num_spare")
            if not is_integer(value) or value < least:
                raise ValueError(
                    f"{field.name} must be an integer of at least {least}, got "
                    f"{value!r}"
                )
            object.__setattr__(self, field.name, int(value))  # of NumPy's, too
        if self.max_rank > MAX_RANK:
            raise ValueError(
                f"max_rank must be at most {MAX_RANK}, got {self.max_rank}"
            )
        if self.page_size < 16 or self.page_size & (self.page_size - 1):
            raise ValueError(
                f"page_size must be a power of two of at least 16, got {self.page_size}"
            )
        if self.max_kv_pages is not None and self.max_kv_pages < self.pages_per_seq:
            raise ValueError(
                f"max_kv_pages must be at least {self.pages_per_seq}, for one sequence "
                f"of max_model_len, got {self.max_kv_pages}"
            )

    @property
    def max_rows(self) -> int:
        """Most rows of a step."""
        return max(self.max_seats, self.max_step_rows)

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)

    @property
    def max_tokens(self) -> int:
        """Tokens that the pages of a sequence hold, `max_model_len` or a few more."""
        return self.pages_per_seq * self.page_size

    @property
    def num_kv_pages(self) -> int:
        return _at_most(self.max_seats * self.pages_per_seq, self.max_kv_pages)

    @property
    def num_device_slots(self) -> int:
        """Slots that the device has, the spare ones too."""
        return self.num_slots + self.num_spare

    @property
    def pages_per_adapter(self) -> int:
        """Rank pages that an adapter of `max_rank` has in a group."""
        return -(-self.max_rank // RANK_PAGE)

    @property
    def num_rank_pages(self) -> int:
        """Rank pages of a group: one adapter more than slots, for replacing one."""
        wanted = (self.num_slots + 1) * self.pages_per_adapter
        return _at_most(wanted, self.max_rank_pages)

    def check_model(self, config: LlamaConfig) -> None:
        """Raise ValueError if a model cannot be served so."""
        limit = config.max_position_embeddings
        if self.max_model_len > limit:
            raise ValueError(
                "max_model_len must be at most the model's max_position_embeddings "
                f"{limit}, got {self.max_model_len}"
            )
        widths = {"head_dim": config.head_dim}
        for group in MODULE_GROUPS:
            widths[f"the input of {group}"] = config.d_in(group)
            for width in config.d_outs(group):
                widths[f"an output of {group}"] = width
        for name, width in widths.items():
            if width % 8:
                raise ValueError(
                    f"{name} must be a multiple of 8 for the kernels, got {width}"
                )
        if config.head_dim > _MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim must be at most {_MAX_HEAD_DIM}, got {config.head_dim}"
            )


def _at_most(wanted: int, limit: int | None) -> int:
    return wanted if limit is None else min(wanted, limit)
