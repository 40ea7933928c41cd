"""Create figures with matplotlib, which is an optional dependency."""

from __future__ import annotations

import logging
import sys
import warnings
from argparse import ArgumentParser, ArgumentTypeError
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_plugins.common.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours for colour-blind readers, except yellow, which is too pale for lines.
_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"]
_DASHES = ["-", "--", ":", "-."]


def add_picture(parser: ArgumentParser, default: str | None = None) -> None:
    """Add the option for the output file."""
    meaning = "picture to write: .png, .pdf, .svg" + ("" if default is None else " (default: %(default)s)")
    parser.add_argument(
        "--output", type=_picture, default=default, required=default is None, metavar="FILE", help=meaning
    )


def _picture(name: str) -> Path:
    path = Path(name)
    if path.suffix.lower() not in {".png", ".pdf", ".svg"}:
        raise ArgumentTypeError(f"{name} must end in .png, .pdf or .svg")
    if path.is_dir():
        raise ArgumentTypeError(f"{name} is a folder; give a file")
    return path


def line_styles(number: int) -> dict[str, str]:
    """Return the colour and dashes of a line; lines that share a colour have different dashes."""
    rounds, colour = divmod(number, len(_COLOURS))
    return {"color": _COLOURS[colour], "linestyle": _DASHES[rounds % len(_DASHES)]}


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure whose layout adapts to its labels; sizes are in inches."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # importing fairseq sets the root logger to DEBUG
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (an optional dependency)
    except ImportError as error:
        raise ValueError("matplotlib: not installed, but needed for plots; pip install matplotlib") from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def fonts_for(text: str) -> list[str]:
    """Return installed fonts that together cover a text; matplotlib's default font comes first.

    Characters without a font are drawn as boxes, with a warning.
    """
    from matplotlib import font_manager, ft2font  # noqa: PLC0415 (an optional dependency)

    def letters(file: str) -> set[str]:
        with suppress(RuntimeError, OSError):  # FreeType cannot read some font files
            return {letter for letter in missing if ord(letter) in ft2font.FT2Font(file).get_charmap()}
        return set()

    manager, missing = font_manager.fontManager, {letter for letter in text if letter.isprintable()}
    missing -= letters(font_manager.findfont("DejaVu Sans"))
    fonts = ["DejaVu Sans"]
    if missing:
        for file in {*font_manager.findSystemFonts()} - {font.fname for font in manager.ttflist}:
            with suppress(RuntimeError, OSError, UnicodeError):
                manager.addfont(file)  # matplotlib's list of fonts may be out of date
        plain = (font for font in manager.ttflist if (font.style, font.weight) == ("normal", 400))
        found = {font.name: letters(font.fname) for font in plain if "Last Resort" not in font.name}
        while best := max(found, key=lambda name: len(found[name] & missing), default=None):
            if not found[best] & missing:
                break
            fonts.append(best)
            missing -= found.pop(best)
    if missing:
        some = " ".join(sorted(missing)[:10])
        print(
            f"warning: no installed font has {some}, which are drawn as boxes; install a font for these characters, "
            "for example Noto Sans CJK for Chinese, Japanese and Korean (apt install fonts-noto-cjk)",
            file=sys.stderr,
        )
    return fonts


def save(figure: Figure, output: Path) -> None:
    """Write a figure to a file in the format of the file's suffix."""
    picture = BytesIO()  # matplotlib hides the OSError of a full disk
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # see `fonts_for`
        figure.savefig(picture, format=output.suffix[1:])
    with replacing(output) as beside:
        beside.write_bytes(picture.getvalue())
