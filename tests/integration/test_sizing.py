"""Tables of what sharing saves and of what fits agree with the formula and with the table that they abridge."""

import re
from fractions import Fraction
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def rows(page, heading):
    """Cells of the first table after a heading, its head included and the line below it left out."""
    text = (DOCS / page).read_text(encoding="utf-8").split(f"{heading}\n", 1)[1]
    table = re.search(r"(^\|.*\n)+", text, re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if not line.startswith("|---")]


def test_token_ratios_are_those_of_the_formula():
    head, *body = rows("performance.md", "## What sharing saves")
    for ratio, *cells in body:
        p_over_r = Fraction(ratio)
        for column, cell in zip(head[1:], cells, strict=True):
            group = int(column.removeprefix("G = "))
            assert cell == f"{float(group * (p_over_r + 1) / (p_over_r + group)):.1f}", (ratio, column)


def test_the_largest_models_are_those_of_the_whole_table():
    head, *body = rows("memory.md", "## Qwen3 on 24, 48 and 80 GB")
    methods, *short = rows("memory.md", "## Does it fit?")
    for gpu, *cells in short:
        column = head.index(f"tokens, {gpu}")
        for method, cell in zip(methods[1:], cells, strict=True):
            fitting = [row[0] for row in body if row[1] == method and row[column] != "-"]
            assert cell == fitting[-1], (gpu, method)
