"""matplotlib, which is an optional dependency."""

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

# Okabe and Ito's, which colour-blind readers can tell apart, but for yellow, too pale for a line.
_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"]
_DASHES = ["-", "--", ":", "-."]


def add_picture(parser: ArgumentParser, default: str | None = None) -> None:
    """The option that names what is drawn."""
    meaning = "picture to write: .png, .pdf, .svg" + ("" if default is None else " (default: %(default)s)")
    parser.add_argument(
        "--output", type=_picture, default=default, required=default is None, metavar="FILE", help=meaning
    )


def _picture(name: str) -> Path:
    path = Path(name)
    if path.suffix.lower() not in {".png", ".pdf", ".svg"}:  # without one, matplotlib would write another file
        raise ArgumentTypeError(f"{name} does not end in .png, .pdf or .svg")
    if path.is_dir():
        raise ArgumentTypeError(f"{name} is a folder")
    return path


def line_styles(number: int) -> dict[str, str]:
    """How the lines of a picture differ: by colour, and when those are used up by their dashes."""
    rounds, colour = divmod(number, len(_COLOURS))
    return {"color": _COLOURS[colour], "linestyle": _DASHES[rounds % len(_DASHES)]}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that makes room for all that is written on it; sizes in inches.

    Raises:
        ValueError: matplotlib is not installed.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # importing fairseq sets the root logger to DEBUG
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (an optional dependency)
    except ImportError as error:
        raise ValueError("plotting needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def fonts_for(text: str) -> list[str]:
    """Return installed fonts that together have all letters of a text, matplotlib's own one first.

    Letters that no font has are drawn as boxes; a warning names them.
    """
    from matplotlib import font_manager, ft2font  # noqa: PLC0415 (an optional dependency)

    def letters(file: str) -> set[str]:
        with suppress(RuntimeError, OSError):  # a file that FreeType cannot read
            return {letter for letter in missing if ord(letter) in ft2font.FT2Font(file).get_charmap()}
        return set()

    manager, missing = font_manager.fontManager, {letter for letter in text if letter.isprintable()}
    missing -= letters(font_manager.findfont("DejaVu Sans"))
    fonts = ["DejaVu Sans"]
    if missing:
        for file in {*font_manager.findSystemFonts()} - {font.fname for font in manager.ttflist}:
            with suppress(RuntimeError, OSError, UnicodeError):
                manager.addfont(file)  # installed since matplotlib made its list
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
            f"warning: no installed font has {some}: boxes are drawn instead; install a font for this script, such as "
            "Noto Sans CJK for Chinese, Japanese and Korean (apt install fonts-noto-cjk)",
            file=sys.stderr,
        )
    return fonts


def save(figure: Figure, output: Path) -> None:
    """Write a picture of the kind that its name tells.

    Raises:
        OSError: it cannot be written.
    """
    picture = BytesIO()  # of a full disk matplotlib tells other errors
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # see `fonts_for`
        figure.savefig(picture, format=output.suffix[1:])
    with replacing(output) as beside:
        beside.write_bytes(picture.getvalue())
