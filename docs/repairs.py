"""Write the list of repairs in ``docs/reliability.md``, from the first paragraphs of their docstrings."""

from __future__ import annotations

from pathlib import Path

from fairseq_plugins.repairs import REPAIRS

PAGE = Path(__file__).with_name("reliability.md")
# The modules of each part of the list.
PARTS = {
    "Safety": ("checkpoints", "safety"),
    "Resuming": ("epochs", "resuming", "saving"),
    "Several processes, and training on CPUs": ("training",),
    "Translating": ("command", "hub", "texts", "translating"),
}
BEGIN, END = "<!-- python docs/repairs.py -->\n", "<!-- end -->"


def render() -> str:
    """Return the list as Markdown."""
    lines = []
    for part, modules in PARTS.items():
        lines += [f"**{part}**", ""]
        for repair in sorted(REPAIRS, key=lambda repair: repair.__name__):
            if repair.__module__.rpartition(".")[2] in modules:
                if repair.__doc__ is None:
                    raise ValueError(f"{repair.__name__} has no docstring; describe the fault that it repairs")
                first = repair.__doc__.partition("\n\n")[0]
                lines.append("- " + " ".join(first.replace("``", "`").split()))
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{render()}{END}{rest.partition(END)[2]}", encoding="utf-8")
