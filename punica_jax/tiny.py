"""The tiny model that ships with the package: where it lies and what to ask it.

A byte-level Llama that echoes a lower-case word, and eight adapters that each do
something else with it; `demos/train_tiny.py` in the repository made them. Knows paths
and text only, no arrays.
"""

from pathlib import Path

_MODEL_DIR = Path(__file__).parent / "tiny_llama"
_DEMO_PROMPTS: tuple[tuple[str | None, str, str], ...] = (
    (None, "monkey", "monkey"),
    ("upper", "hello", "HELLO"),
    ("twice", "kernel", "kkeerrnneell"),
    ("caesar", "punica", "sxqlfd"),
    ("reverse", "strawberry", "yrrebwarts"),
    ("morse", "world", ".-- --- .-. .-.. -.."),
    ("piglatin", "student", "udentstay"),
    ("sort", "triangle", "aegilnrt"),
    ("count", "banana", "a3b1n2"),
)


def model_dir() -> Path:
    """Return the base model's directory, as Hugging Face lays one out."""
    return _MODEL_DIR


def adapter_dirs() -> dict[str, Path]:
    """Return the adapters' PEFT directories by name, from the least rank up."""
    names = [adapter for adapter, _, _ in _DEMO_PROMPTS if adapter is not None]
    return {name: _MODEL_DIR / "adapters" / name for name in names}


def demo_prompts() -> list[tuple[str | None, str, str]]:
    """Return (adapter or None, prompt, right answer), one for each adapter and none.

    No prompt is a word that was trained on.
    """
    return list(_DEMO_PROMPTS)
