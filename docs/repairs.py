"""Write the list of repairs in ``docs/reliability.md``, from the first paragraphs of their docstrings."""

from __future__ import annotations

import inspect
from pathlib import Path

from fairseq_plugins import repairs

PAGE = Path(__file__).with_name("reliability.md")
PARTS = {
    "Safety": repairs.SAFETY,
    "Resuming": repairs.RESUMING,
    "Several processes, and CPUs": repairs.DISTRIBUTED,
    "Speed": repairs.SPEED,
    "Translating": repairs.TRANSLATING,
}
BEGIN, END = "<!-- python docs/repairs.py -->\n", "<!-- end -->"


def render() -> str:
    """Return the list as Markdown."""
    lines = []
    for part, functions in PARTS.items():
        lines += [f"**{part}**", ""]
        for function in functions:
            first = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
            lines.append("- " + first.replace("``", "`"))
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{render()}{END}{rest.partition(END)[2]}", encoding="utf-8")
