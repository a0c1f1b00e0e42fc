"""Fill the README's tables from results: `python -m benchmarks.readme [--check]`.

Knows which sections there are and where they go; what they say is `readme_tables`',
`readme_decode`'s and `readme_serving`'s.
"""

import argparse
import re
import sys
from collections.abc import Callable

from benchmarks import readme_decode, readme_serving, readme_tables
from benchmarks.provenance import ROOT

README = ROOT / "README.md"
SECTIONS: dict[str, Callable[[], str]] = {
    "tiny": readme_tables.tiny,
    "measured": readme_decode.measured,
    "serving": readme_serving.measured,
}


def filled(text: str) -> str:
    """Return the README with every section made anew."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(f"({re.escape(begin)}\n).*?({re.escape(end)})", re.DOTALL)
        content = make()
        text, count = pattern.subn(lambda m, c=content: f"{m[1]}{c}\n{m[2]}", text)
        assert count == 1, f"README.md must have one section {name!r}, has {count}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    old = README.read_text()
    new = filled(old)
    if args.check:
        sys.exit(0 if new == old else "README.md is stale: python -m benchmarks.readme")
    README.write_text(new)


if __name__ == "__main__":
    main()
