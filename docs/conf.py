"""The documentation site: `scripts/site` makes it from the Markdown of the repository with Sphinx.

The pages are the files that a reader of the repository sees; nothing is written twice. The navigation is the list of
docs/README.md. docs/decisions/0040-documentation-site.md says why it is Sphinx.
"""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hpcenv.version import VERSION  # noqa: E402 -- this checkout, whatever is installed

project = "hpcenv"
author = "the authors of hpcenv"
copyright = f"{author}. Apache License 2.0"  # noqa: A001 -- the name that Sphinx reads
version = release = VERSION
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "README"
include_patterns = ["README.md", "README.zh-CN.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/**"]

html_theme = "furo"  # it has the dark mode and the search
html_title = f"hpcenv {VERSION}"
html_copy_source = False
html_static_path = html_css_files = ["site.css"]
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

myst_heading_anchors = 4
default_role = "literal"  # docstrings write `name`
smartquotes = False  # `--nodes` stays what is typed
autodoc_typehints = "description"
autodoc_member_order = "groupwise"
python_use_unqualified_type_names = True

_SECTION = re.compile(r"^## (?P<title>.+)\n(?P<lines>(?:(?!## ).*\n)*)", re.MULTILINE)
_PAGE = re.compile(r"^- .*?\[[^\]]+\]\((?P<path>[^)#]+\.md)\)", re.MULTILINE)


def navigation(listing: str) -> str:
    """Return the tables of contents, hidden on the page itself, for the sections and links of docs/README.md."""
    tables = ["```{toctree}\n:hidden:\n\ndocs/README\n```\n"]
    for section in _SECTION.finditer(listing):
        pages = "".join(f"docs/{found['path']}\n" for found in _PAGE.finditer(section["lines"]))
        tables.append(f"```{{toctree}}\n:hidden:\n:caption: {section['title']}\n\n{pages}```\n")
    others = "CONTRIBUTING\nSECURITY\nCHANGELOG\nREADME.zh-CN\n"
    tables.append(f"```{{toctree}}\n:hidden:\n:caption: The project\n\n{others}```\n")
    return "\n".join(tables)


def _add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    del app
    if name == root_doc:
        source[0] += "\n" + navigation((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))


def _first_page(app: Sphinx, failure: Exception | None) -> None:
    """Web servers look for index.html."""
    if failure is None and app.builder.format == "html":
        page = Path(app.outdir, f"{root_doc}.html")
        Path(app.outdir, "index.html").write_bytes(page.read_bytes())


def setup(app: Sphinx) -> None:
    """Connect the two functions to Sphinx."""
    app.connect("source-read", _add_navigation)
    app.connect("build-finished", _first_page)
