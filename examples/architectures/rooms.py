"""Draw the packages of fairseq_plugins and their imports as an SVG; arrows point to imported packages.

    python examples/architectures/rooms.py docs/rooms.svg

Implied arrows are left out: if a imports b and b imports c, there is no arrow from a to c, even if a imports c.
"""

from __future__ import annotations

import argparse
import ast
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path
from textwrap import wrap

PACKAGE = Path(__file__).parents[2] / "fairseq_plugins"
WIDTH, HEIGHT, STEP_X, STEP_Y = 224, 74, 240, 120

Graph = dict[str, set[str]]

HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" font-family="sans-serif" font-size="12">
<marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0 0L8 4L0 8z" fill="#555"/></marker><rect width="100%" height="100%" fill="#fff"/>"""
ARROW = '<path d="M{} {}C{} {} {} {} {} {}" fill="none" stroke="#555" marker-end="url(#end)"><title>{}</title></path>'
BOX = '<rect x="{}" y="{}" width="{}" height="{}" rx="6" fill="#eef3fa" stroke="#356"/>'
TEXT = '<text x="{}" y="{}" text-anchor="middle" font-weight="{}">{}</text>'


def read_imports() -> Graph:
    """Return the packages that each package imports, either at the top of a file or inside functions."""
    graph: Graph = {init.parent.name: set() for init in sorted(PACKAGE.glob("*/__init__.py"))}
    for name, imported in graph.items():
        for file in (PACKAGE / name).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):  # matches ``from fairseq_plugins import cpu``, too
                    modules = [f"{node.module}.{each.name}" for each in node.names]
                imported.update(each.split(".")[1] for each in modules if each.startswith(f"{PACKAGE.name}."))
        imported &= graph.keys() - {name}
    return graph


def reduce(graph: Graph) -> tuple[Graph, dict[str, int]]:
    """Return the graph without implied arrows, and the row of each package; row 0 is at the bottom.

    Raises:
        graphlib.CycleError: the imports have a cycle.
    """
    reachable: Graph = {}
    rows: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        reachable[name] = graph[name].union(*(reachable[each] for each in graph[name]))
        rows[name] = 1 + max((rows[each] for each in graph[name]), default=-1)
    return {name: graph[name].difference(*(reachable[each] for each in graph[name])) for name in graph}, rows


def draw(graph: Graph, rows: dict[str, int]) -> str:
    """Return the SVG; a package is described by the first line of its docstring."""
    levels = [[name for name in graph if rows[name] == row] for row in range(max(rows.values()) + 1)]
    right, bottom = STEP_X * max(map(len, levels)), STEP_Y * len(levels)
    places, lines = {}, [HEAD.format(right, bottom)]
    for row, level in enumerate(levels):
        for place, name in enumerate(level):
            left = (right - STEP_X * len(level)) // 2 + STEP_X * place
            places[name] = left + STEP_X // 2, bottom - STEP_Y * (row + 1) + (STEP_Y - HEIGHT) // 2  # middle and top
    for name, (x, top) in places.items():
        for other in sorted(graph[name]):
            start, (x2, end) = top + HEIGHT, places[other]
            lines.append(ARROW.format(x, start, x, start + 60, x2, end - 60, x2, end, f"{name} imports {other}"))
    for name, (x, top) in places.items():
        lines += [BOX.format(x - WIDTH // 2, top, WIDTH, HEIGHT), TEXT.format(x, top + 17, "bold", name)]
        first = (ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text("utf-8"))) or "").split("\n")[0]
        for number, text in enumerate(wrap(first.replace("`", ""), 36)[:3]):
            lines.append(TEXT.format(x, top + 34 + 15 * number, "normal", escape(text)))
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg", type=Path, help="file to write")
    parser.parse_args().svg.write_text(draw(*reduce(read_imports())), encoding="utf-8")
