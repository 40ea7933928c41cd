"""Files, headings, commands, make targets, options, architectures and other names on the pages exist."""

from __future__ import annotations

import re
import runpy
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fairseq import options
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY

import fairseq_plugins
from fairseq_plugins.cli import main as cli
from tests.commands import ROOT

fairseq_plugins.install()

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:\A|\n\n)((?:    .*(?:\n|\Z)|\n(?=    ))+)")
SPAN = re.compile(r"(`+)(.+?)\1", re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
# Options of pip, hydra, sacreBLEU and torchrun.
FOREIGN = {"--echo", "--nnodes", "--no-build-isolation", "--config-dir", "--config-name"}
FOREIGN |= {"--version", "--branch-step"}  # Options of fairseq-plugins itself, and of version 0.1.0 (CHANGELOG.md).
FOREIGN |= {"--max-restarts", "--rdzv-backend", "--standalone"}


class Page(NamedTuple):
    path: Path
    prose: str  # text without indented code
    code: list[str]  # indented code, and text between backticks


@cache
def read(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    blocks = FENCE.findall(text)
    text = FENCE.sub("", text)
    blocks += INDENTED.findall(text)
    prose = INDENTED.sub("\n\n", text)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    return Page(path, prose, [*lines, *(span.replace("\n", " ") for _, span in SPAN.findall(prose))])


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings on GitHub."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)) for heading in headings]
    return {heading.strip().lower().replace(" ", "-") for heading in plain}


@pytest.fixture(params=PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def page(request: pytest.FixtureRequest) -> Page:
    return read(request.param)


def words(page: Page) -> Iterator[str]:
    """Return approximately the words of all code, as a shell would split them."""
    for code in page.code:
        yield from (word.strip("'\"(),:;") for word in re.split(r"[\s=|]+", code))


def test_links_lead_somewhere(page: Page) -> None:
    broken = []
    for target in LINK.findall(SPAN.sub(lambda span: span[0].replace("(", ""), page.prose)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.path.parent / file).resolve() if file else page.path
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def test_files_exist(page: Page) -> None:
    """Paths start at the repository, the package or the page's folder; other files are found by their names."""
    roots = (ROOT, ROOT / "fairseq_plugins", page.path.parent)
    # Other files are written by commands.
    folders = {"docs", "examples", "fairseq_plugins", "fairseq_plugins_user_dir", "tests", "user_dir"}
    missing = []
    for word in words(page):
        first, *others = word.split("/")
        script = re.fullmatch(r"[\w.*/-]+\.(py|sh|yaml|md|toml)", word) and not word.startswith((".", "*"))
        if first in ("fairseq", "fairseq_cli") or not (script or (first in folders and others)):
            continue
        if "out" in others or re.search(r"[{}$<>…]|\.\.\.|EXPERIMENT|FOLDER", word):
            continue
        found = any(any(root.glob(word.rstrip("/"))) for root in roots)
        somewhere = not others and any(
            path for folder in ("fairseq_plugins", "tests", "examples") for path in (ROOT / folder).rglob(word)
        )
        if not found and not somewhere:
            missing.append(word)
    assert missing == []


def test_targets_of_make_exist(page: Page) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {name for code in page.code for name in re.findall(r"(?:^|[;&] *)make ([a-z-]+)", code)} <= targets


@cache
def known_options() -> set[str]:
    """Return all options of fairseq's commands, the plugin, the tools and the examples' scripts."""
    parsers = [
        options.get_preprocessing_parser(),
        options.get_training_parser(),
        options.get_generation_parser(interactive=True),
        options.get_validation_parser(),
    ]
    for name in cli.COMMANDS:
        cli.find(name).add_arguments(parser := ArgumentParser())
        parsers.append(parser)
    registries = [MODEL_REGISTRY, TASK_REGISTRY, *(each["registry"] for each in REGISTRIES.values())]
    for registered in (each for registry in registries for each in registry.values()):
        dataclass = getattr(registered, "__dataclass", None)
        parsers.append(parser := ArgumentParser(conflict_handler="resolve", add_help=False))
        if dataclass is not None:
            gen_parser_from_dataclass(parser, dataclass())
        elif hasattr(registered, "add_args"):
            registered.add_args(parser)
    known = {option for parser in parsers for option in parser._option_string_actions}
    sources = [*ROOT.glob("examples/**/*.py"), *ROOT.glob("examples/**/*.sh"), ROOT / "tests" / "conftest.py"]
    for source in (path.read_text(encoding="utf-8") for path in sources):
        known.update(re.findall(r"--[a-z][a-z0-9-]+", source))
        # Scripts with many options list them in tables of name, default and help.
        known.update(f"--{name}" for name in re.findall(r'\("([a-z][a-z0-9-]+)", ', source))
    return known


def test_options_exist(page: Page) -> None:
    given = {word for word in words(page) if re.fullmatch(r"--[a-z][a-z0-9-]+", word)}
    assert given - known_options() - FOREIGN == set()


def test_the_picture_of_speed_is_drawn_from_cells_of_its_page() -> None:
    script = runpy.run_path(str(ROOT / "examples" / "benchmarks" / "speed_figure.py"))
    columns, table = script["read_table"](script["PAGE"].read_text(encoding="utf-8"))
    for row, *_ in script["BARS"]:
        cells = dict(zip(columns, table[row], strict=True))
        assert 0 < float(cells["one sentence, seconds"]) < float(cells["seconds"]) < 10


SPEED, FRONT, EXAMPLES = ROOT / "docs" / "performance.md", ROOT / "README.md", ROOT / "examples" / "README.md"
FIGURES = runpy.run_path(str(ROOT / "examples" / "benchmarks" / "figures.py"))


def cells(begin: str) -> list[str]:
    """Return the cells of the first row of the page of speed with this beginning, without text in brackets."""
    line = next(line for line in SPEED.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {begin}"))
    return [cell.partition("(")[0].strip() for cell in line.split("|")[2:]]


# The columns of the page's tables of ratios: runs and precisions, beam sizes and precisions, and precisions.
GENERATION = [(run, kind) for run in ("16 sentences", "one sentence") for kind in ("float32", "bfloat16", "int8")]
GENERATION.remove(("one sentence", "bfloat16"))
COMMANDS = [(1, "float32"), (1, "int8"), (5, "float32"), (5, "int8")]
TRAINING = [None, None, ("", "float32"), None, ("", "bfloat16")]

FCONV = "`convs2s` versus fconv as shipped"
CTRANSLATE2 = "`convs2s` versus CTranslate2"
TRANSFORMER = "`weighted_transformer_small` versus fairseq's `transformer`"
SMALL = "weighted_transformer_small"
EXPORTED = f"{SMALL}, exported, {{1}}, beam {{0}}, versus CTranslate2, {{1}}, beam {{0}}"
WHOLE = "whole commands: {}, translation_fast, {{1}}, beam {{0}}, versus {}, beam {{0}}"
TRAINED = ["`fconv_iwslt_de_en` and", "`fconv_wmt_en_ro` (20+20", "`transformer` (6+6", "`lstm` (bidirectional"]
# For rows of the page, given by their beginnings, the names that figures.py gives to the ratios, and the columns.
MEASURED: list[tuple[str, str, Sequence[tuple[object, str] | None]]] = [
    (FCONV, "{0}: convs2s, translation_fast, {1}, versus fconv, as shipped", GENERATION),
    ("`convs2s` versus fconv with", "{0}: convs2s, translation_fast, {1}, versus fconv, weights cached", GENERATION),
    (CTRANSLATE2, "{0}: convs2s, translation_fast, {1}, versus CTranslate2, {1}", GENERATION),
    (f"`{SMALL}` versus CTr", f"{{0}}: {SMALL}, translation_fast, {{1}}, versus CTranslate2, {{1}}", GENERATION),
    (TRANSFORMER, f"{{0}}: {SMALL}, translation_fast, {{1}}, versus transformer", GENERATION),
    ("`convs2s`, `translation_fast`, versus", WHOLE.format("convs2s", "fconv"), COMMANDS),
    (f"`{SMALL}`, `translation_fast`, versus", WHOLE.format(SMALL, "transformer"), COMMANDS),
    (f"`{SMALL}`, exported", f"exported: {EXPORTED}", COMMANDS),
    ("the same, one thread", f"exported, one thread: {EXPORTED}", COMMANDS),
    *(
        (begin, f"an update: {model}, {{1}}, versus {model}, fairseq", TRAINING)
        for begin, model in zip(TRAINED, FIGURES["TRAINED"], strict=True)
    ),
]


@pytest.mark.parametrize(("begin", "name", "columns"), MEASURED, ids=[begin for begin, *_ in MEASURED])
def test_the_page_of_speed_has_the_ratios_that_make_figures_measured(begin: str, name: str, columns: Any) -> None:
    found = FIGURES["read_ratios"](FIGURES["PAGES"].read_text(encoding="utf-8"))
    for column, cell in zip(columns, cells(begin), strict=False):
        if column and cell:
            shown = cell.removesuffix(" ×")
            assert f"{found[name.format(*column)]:.{len(shown.partition('.')[2])}f}" == shown, column


@pytest.mark.parametrize(
    ("page", "text", "row"),
    [
        (FRONT, "16 sentences, beam 5 | fairseq's fconv | {0} | {2} |", FCONV),
        (FRONT, "beam 5 | fairseq's `transformer` | {0} | {2} |", TRANSFORMER),
        (FRONT, "CTranslate2's Transformer | {0} | {2} |", CTRANSLATE2),
        (EXAMPLES, "16 sentences {0} as fast as fconv, and one sentence {3} as fast;", FCONV),
        (EXAMPLES, "16 sentences {0} as fast as fairseq's Transformer, and one sentence {3} as fast |", TRANSFORMER),
    ],
)
def test_pages_have_the_ratios_of_the_page_of_speed(page: Path, text: str, row: str) -> None:
    assert text.format(*cells(row)) in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("figure", "pages"),
    [
        ("38.6 and 38.8 BLEU", "README.md examples/README.md examples/multi30k/README.md"),
        ("99.3 BLEU", "examples/README.md examples/quickstart/README.md"),
        ("5 to 10 minutes", "README.md Makefile examples/README.md examples/quickstart/README.md"),
        ("1.7 times as much memory", "docs/performance.md docs/reliability.md fairseq_plugins/repairs/command.py"),
    ],
)
def test_pages_agree_on_a_figure(figure: str, pages: str) -> None:
    """If a figure changes on one page, the test fails until the other pages have the new figure, too."""
    without = [page for page in pages.split() if figure not in " ".join((ROOT / page).read_text("utf-8").split())]
    assert without == []


def test_the_citation_has_the_version() -> None:
    assert f"version: {fairseq_plugins.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_list_of_repairs_is_that_of_their_docstrings() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "repairs.py"))
    assert f"{script['BEGIN']}\n{script['render']()}{script['END']}" in script["PAGE"].read_text(encoding="utf-8")
