"""Runs docs/notebook.ipynb, and keeps in it what its cells show: text, and pictures as SVG.

.venv/bin/python .ci/notebook.py
"""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "notebook.ipynb"


def run(cells: list[dict[str, Any]], names: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Runs code cells one after another; yields what each of them shows, as a notebook keeps it.

    Args:
        cells: Those of the notebook that have code.
        names: What the cells know, and what they make.
    """
    for number, cell in enumerate(cells, 1):
        body = ast.parse("".join(cell["source"]), f"{NOTEBOOK.name}, {cell['id']}")
        shown = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
        value = None
        with redirect_stdout(io.StringIO()) as text:
            exec(compile(body, f"{NOTEBOOK.name}, {cell['id']}", "exec"), names)
            if isinstance(shown, ast.Expr):
                expression = ast.Expression(shown.value)
                value = eval(compile(expression, f"{NOTEBOOK.name}, {cell['id']}", "eval"), names)
        outputs = []
        if text.getvalue():
            outputs.append(
                {"name": "stdout", "output_type": "stream", "text": _lines(text.getvalue())}
            )
        if value is not None:
            data = {"text/plain": _lines(repr(value))}
            if hasattr(value, "_repr_svg_"):
                data["image/svg+xml"] = _lines(value._repr_svg_())
            outputs.append(
                {
                    "data": data,
                    "execution_count": number,
                    "metadata": {},
                    "output_type": "execute_result",
                }
            )
        yield outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    """Runs the notebook, and writes it with its outputs."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs = list(run(code, {"__name__": "__main__"}))
    for number, cell in enumerate(code, 1):
        cell.update(outputs=outputs[number - 1], execution_count=number)
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    NOTEBOOK.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
