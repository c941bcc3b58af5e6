"""What MkDocs is to do with the pages of docs (`make docs`), as a hook of mkdocs.yml.

The pages are written for the repository's own view of files. Here links that leave docs lead to
the repository, or become plain text where `repo_url` does not say where that is; pages from
outside docs, such as the README, join the site; the pages of the methods find their place in the
navigation; and the marks of reference pages are filled.
"""

import posixpath
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deft_policies.methods import READING_ORDER
from scripts.reference_pages import filled

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs"
METHODS = "methods/*.md"
# Pages of the repository and what they are called on the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/vulnerabilities.md",
    "policies/deft_policies/tiny_libero/README.md": "project/tiny_libero.md",
    "scripts/tiny_libero/README.md": "project/how_tiny_libero_was_made.md",
    "examples/ros2/README.md": "guides/ros2.md",
}
_CODE = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]*)(#[^)\s]*)?\)")


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """Put the pages of the methods where the navigation says `methods/*.md`."""
    config.nav = with_methods(config.nav)
    return config


def with_methods(nav: Any) -> Any:
    """A navigation with the methods' pages in it: a new method needs no line of its own."""
    if isinstance(nav, dict):
        return {title: with_methods(entry) for title, entry in nav.items()}
    if not isinstance(nav, list):
        return nav
    return _method_pages() if nav == [METHODS] else [with_methods(entry) for entry in nav]


def _method_pages() -> list[str]:
    order = {name: place for place, name in enumerate(READING_ORDER)}
    found = (path.stem for path in (ROOT / DOCS / "methods").glob("*.md"))
    names = sorted(found, key=lambda name: (order.get(name, len(order)), name))
    return [METHODS.replace("*", name) for name in names]


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the pages that lie outside docs."""
    from mkdocs.structure.files import File

    for path, uri in OUTSIDE.items():
        text = (ROOT / path).read_text("utf-8")
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Fill marks, then lead every link to where it leads on the site."""
    uri = page.file.src_uri
    lies_at = {uri: path for path, uri in OUTSIDE.items()}.get(uri, f"{DOCS}/{uri}")
    known = partial(_is_on_site, files)
    return relinked(filled(markdown), lies_at, uri, known, config.repo_url or "")


def _is_on_site(files: "Files", uri: str) -> bool:
    found = files.get_file_from_path(uri)
    return found is not None and not found.inclusion.is_excluded()


def relinked(
    text: str, lies_at: str, uri: str, is_on_site: Callable[[str], bool], repository: str
) -> str:
    """A page of the repository with its links as the site has them.

    `lies_at` is where the page lies in the repository, `uri` where on the site.
    """

    def led(found: re.Match[str]) -> str:
        mark, words, link, anchor = found[1], found[2], found[3], found[4] or ""
        if not link:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(lies_at), link))
        target = OUTSIDE.get(path, path.removeprefix(f"{DOCS}/"))
        if (path in OUTSIDE or path.startswith(f"{DOCS}/")) and is_on_site(target):
            place = posixpath.relpath(target, posixpath.dirname(uri) or ".")
            return f"{mark}[{words}]({place}{anchor})"
        if not repository or mark:
            return words
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"[{words}]({repository.rstrip('/')}/{kind}/main/{path}{anchor})"

    parts, end = [], 0
    for code in _CODE.finditer(text):  # links in code are no links
        parts += [_LINK.sub(led, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _LINK.sub(led, text[end:])])
