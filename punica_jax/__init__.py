"""punica-jax: many LoRA adapters over one base model, mixed in one batch, in JAX."""

from punica_jax.functional import lora

__all__ = ["lora"]
