"""Show jaxtyping's shapes as they are written: `Int[Array, "rows"]`.

Knows annotations as griffe parses them, which takes a text of one word for a name and
keeps others in quotes of another kind.
"""

from typing import Any

import griffe


def _quote_shapes(expression: Any) -> None:
    """Put every shape of an annotation in double quotes, in place."""
    # A name's only part is the name itself.
    if not isinstance(expression, griffe.Expr) or isinstance(
        expression, griffe.ExprName
    ):
        return
    for part in expression.iterate(flat=False):
        _quote_shapes(part)
    if (
        isinstance(expression, griffe.ExprSubscript)
        and isinstance(expression.slice, griffe.ExprTuple)
        and expression.canonical_path.startswith("jaxtyping.")
    ):
        array, shape = expression.slice.elements
        text = str(shape).strip("\"'")
        expression.slice.elements = [array, f'"{text}"']


class JaxtypingShapes(griffe.Extension):
    """Goes over the annotations of every function when its module has been read."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        _quote_shapes(func.returns)
        for parameter in func.parameters:
            _quote_shapes(parameter.annotation)
