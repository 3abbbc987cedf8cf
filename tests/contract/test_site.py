"""The documentation site is made from the pages without a warning, and each page is in its navigation."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the words of scripts/site, which calls the same program."""
    folder = tmp_path_factory.mktemp("site")
    words = ("sphinx.cmd.build", "--quiet", "--fail-on-warning", "--keep-going", "--conf-dir", "docs", ".", str(folder))
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_each_page_of_the_repository_is_in_the_navigation(site: Path) -> None:
    first = (site / "index.html").read_text()
    tree = first[first.index('class="sidebar-tree"') :]
    linked = set(re.findall(r'href="([^"#:]+)\.html', tree))
    pages = {str(page.relative_to(ROOT).with_suffix("")) for page in ROOT.glob("docs/**/*.md")}
    assert pages - linked == set()


def test_no_link_of_a_page_leads_nowhere(site: Path) -> None:
    lost = []
    for page in site.rglob("*.html"):
        text = page.read_text()
        for target, anchor in re.findall(r'href="([^":#?]*)(#[^"]*)?"', text):
            file = (page.parent / target).resolve() if target else page
            if not file.exists():
                lost.append(f"{page.name}: {target}")
            elif anchor[1:] and file.suffix == ".html" and f'id="{anchor[1:]}"' not in file.read_text():
                lost.append(f"{page.name}: {target}{anchor}")
    assert lost == []


def test_what_is_typed_stays_as_it_is_and_python_has_its_docstrings(site: Path) -> None:
    options = (site / "docs/reference/options.html").read_text()
    assert "--nproc says how many ranks" in options
    assert "_static/site.css" in options  # an option is not broken after its hyphens
    assert "code span.pre { display: inline-block" in (site / "_static/site.css").read_text()
    assert '<span class="pre">--nproc</span>' in (site / "docs/how-to/submit.html").read_text()
    api = (site / "docs/reference/api.html").read_text()
    assert 'id="hpcenv.submit"' in api
    assert 'id="hpcenv.verify"' in api
