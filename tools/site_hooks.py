"""What MkDocs needs to know of this repository: pages outside of docs/, links to files, plots.

The pages are written for a reader of the repository. On the site, links to pages lead to pages, and
what links to a source file is only its name.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).resolve().parent))

import site_plots

REPO_DIR = Path(__file__).resolve().parent.parent
# Files of the repository, and what they are on the site.
OUTSIDE = {
    "RELEASING.md": "releasing.md",
    "SECURITY.md": "security.md",
    "benchmarks/results/README.md": "results.md",
    "benchmarks/results/nvidia-h100-80gb-hbm3.png": "nvidia-h100-80gb-hbm3.png",
}
LINK = r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)"
FOLDERS = {"benchmarks/results": "results.md"}  # which GitHub shows by their README


def on_files(files, config):
    """Adds the pages that lie elsewhere."""
    for path, name in OUTSIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(REPO_DIR / path)))
    return files


def place_of(page: str) -> str:
    """Where in the repository a page of the site lies."""
    return {name: path for path, name in OUTSIDE.items()}.get(page, f"docs/{page}")


def on_page_markdown(markdown, page, config, files):
    """Turns links between files into links between pages."""
    here = page.file.src_uri

    def link(found: re.Match) -> str:
        image, text, target, anchor = found.groups("")
        if not target or re.match(r"https?:", target):
            return found.group()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place_of(here)), target))
        there = OUTSIDE.get(path) or FOLDERS.get(path)
        if there is None and path.startswith("docs/") and path.endswith(".md"):
            there = path.removeprefix("docs/")
        if there is None:
            return text
        return (
            f"{image}[{text}]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{anchor})"
        )

    markdown = re.sub(LINK, link, markdown)
    return site_plots.with_plots(markdown) if here.startswith("reference/") else markdown
