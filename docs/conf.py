"""Configure the site of the pages (``make site``). Sphinx reads the pages in place, from the repository's root.

A link to a page opens the page, a link to another file of the repository downloads the file, and a link to a folder or
a log becomes text. Each new page must be added to `NAVIGATION`: the build fails if `NAVIGATION` lacks a page, or if a
link is broken.
"""

from __future__ import annotations

import logging
import pkgutil
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

import fairseq_plugins

project = "fairseq_plugins"
html_title = project
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_default_options = {"members": True}
autodoc_typehints = "none"  # the docstrings have shapes and units, and the page stays readable
napoleon_use_ivar = True  # otherwise attributes of named tuples would be described twice
smartquotes = False  # they would change options such as --decoder-attention
default_role = "code"  # docstrings have names in single backticks
myst_heading_anchors = 4  # headings down to level 4 get the same anchors as on GitHub
highlight_language = "none"  # a highlighter cannot tell equations, trees of files and commands apart

root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "examples/**.md"]
# Logs of measurements stay in the repository.
exclude_patterns = ["examples/*/out", "examples/*/data", "examples/benchmarks/*.md", "examples/*/findings.md"]

API = "docs/api"

# The sidebar of every page.
NAVIGATION = {
    "Use": "docs/install docs/quickstart docs/command_line docs/python docs/api docs/export docs/performance "
    "docs/vocabulary docs/whole_sentences",
    "Models": "docs/convs2s docs/weighted_transformer docs/conv_encoder",
    "Examples": "examples/README examples/experiments examples/*/README",
    "Project": "docs/internals docs/glossary docs/reliability SECURITY CHANGELOG CONTRIBUTING",
}


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Append `NAVIGATION` to the site's front page; README.md, which GitHub shows, does not contain `NAVIGATION`."""
    if page == root_doc:
        for caption, pages in NAVIGATION.items():
            lines = ["```{toctree}", ":hidden:", ":glob:", f":caption: {caption}", "", *pages.split(), "```"]
            source[0] += "\n" + "\n".join(lines) + "\n"


def add_docstrings(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the docstrings of all modules except commands and repairs to the page `API`."""
    if page != API:
        return
    root = fairseq_plugins.__name__
    found = {module.name: module.ispkg for module in pkgutil.walk_packages(fairseq_plugins.__path__, f"{root}.")}
    for name, is_package in {root: False, **found}.items():
        if not name.startswith((f"{root}.cli", f"{root}.repairs")):
            # Packages import names from their modules, which have the docstrings.
            directive = f".. automodule:: {name}\n" + "   :no-members:\n" * is_package
            source[0] += f"\n## {name}\n\n```{{eval-rst}}\n{directive}```\n"


def skip_numbers_of_fields(app: Sphinx, what: str, name: str, value: object, skip: bool, options: object) -> bool:
    """Skip fields of named tuples, whose docstrings are only "Alias for field number N"."""
    return skip or (getattr(value, "__doc__", None) or "").startswith("Alias for field number")


def unlink_files_outside_the_site(app: Sphinx, page: nodes.document) -> None:
    """Turn links to folders and to excluded pages of the repository into text."""
    for link in list(page.findall(pending_xref)):
        target = link["reftarget"]
        is_page = (Path(app.srcdir) / f"{target}.md").is_file()
        if (is_page and target not in app.env.found_docs) or (Path(page["source"]).parent / target).is_dir():
            link.replace_self(link.children)


def add_index(app: Sphinx, error: Exception | None) -> None:
    """Write ``index.html``, which redirects browsers to ``README.html``."""
    (Path(app.outdir) / "index.html").write_text('<meta http-equiv="refresh" content="0; url=README.html">\n')


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
    app.connect("source-read", add_docstrings)
    app.connect("autodoc-skip-member", skip_numbers_of_fields)
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    app.connect("doctree-read", unlink_files_outside_the_site)
    app.connect("build-finished", add_index)
