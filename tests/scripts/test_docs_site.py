"""The site has the pages of the repository, links that lead somewhere, and what programs say."""

import re

import pytest
import yaml

import deft_client
from deft_server.app import create_app
from deft_server.settings import Settings
from scripts import docs_site, reference_pages
from scripts.reference_pages import HELPS, REFERENCES, filled
from tests.repository import ROOT, name_of, tracked

REPOSITORY = "https://example.org/deft"


class _Loader(yaml.SafeLoader):
    """MkDocs' file has tags of its own."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
NAVIGATION = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]


def uris(nav) -> list[str]:
    """Every page of a navigation."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [uri for entry in entries for uri in uris(entry)]


PAGES = uris(docs_site.with_methods(NAVIGATION))


def on_site(uri: str) -> bool:
    return uri in PAGES or (ROOT / "docs" / uri).is_file()


def led(text: str, lies_at: str = "docs/serving.md", repository: str = REPOSITORY) -> str:
    uri = docs_site.OUTSIDE.get(lies_at, lies_at.removeprefix("docs/"))
    return docs_site.relinked(text, lies_at, uri, on_site, repository)


def test_every_page_has_its_place_and_every_place_a_page():
    written = {name_of(path).removeprefix("docs/") for path in tracked("docs/*.md")}
    assert sorted(PAGES) == sorted(written | {*docs_site.OUTSIDE.values()})


@pytest.mark.parametrize(
    ("lies_at", "link", "wanted"),
    [
        ("docs/serving.md", "round.md#x", "round.md#x"),
        ("docs/methods/fly.md", "../round.md", "../round.md"),
        ("README.md", "docs/start/robot.md", "start/robot.md"),
        ("README.md", "CONTRIBUTING.md", "project/contributing.md"),
        ("docs/start/install.md", "../../README.md#a", "../index.md#a"),
        ("docs/serving.md", "../Makefile", f"{REPOSITORY}/blob/main/Makefile"),
        ("docs/serving.md", "../examples/ros2", f"{REPOSITORY}/tree/main/examples/ros2"),
        ("examples/ros2/README.md", "../../docs/robot_loop.md", "../robot_loop.md"),
        ("docs/serving.md", "https://example.com/a", "https://example.com/a"),
        ("docs/serving.md", "#settings", "#settings"),
    ],
)
def test_a_link_leads_to_the_same_place_on_the_site(lies_at, link, wanted):
    assert led(f"see [`words`]({link}).", lies_at) == f"see [`words`]({wanted})."


def test_a_link_to_code_is_plain_text_where_the_repository_has_no_address():
    assert led("see [the file](../Makefile).", repository="") == "see the file."


def test_code_is_left_as_it_is():
    text = "```\n[a](../Makefile)\n```\n"
    assert led(text) == text


def test_pictures_come_along():
    assert led("![a](round.svg)") == "![a](round.svg)"


def test_no_command_or_setting_or_address_or_name_is_missing():
    assert {path.stem for path in HELPS.glob("deft*.txt")} == {
        heading.replace("--policy ", "").replace(" ", "_")
        for program in ("deft", "deft-client")
        for heading in re.findall("^#+ (.*)", REFERENCES[program](), re.M)
    }
    assert set(re.findall(r"^\| `(\w+)`", REFERENCES["settings"](), re.M)) == {
        *Settings.model_fields
    }
    paths = create_app(lambda: pytest.fail("loaded")).openapi()["paths"]
    told = re.findall(r"^## ([A-Z]+) (/\S*)", REFERENCES["http"](), re.M)
    assert {(one.upper(), path) for path, methods in paths.items() for one in methods} == {*told}
    named = re.findall(r"^::: (\S+)\.(\w+)$", REFERENCES["python"](), re.M)
    assert [name for _, name in named] == deft_client.__all__


def test_a_schema_that_is_linked_is_on_the_page():
    page = REFERENCES["http"]()
    linked = re.findall(r"\]\(#(\w+)\)", page)
    assert len(linked) > 10
    assert {*linked} <= {name.lower() for name in re.findall("^### (.*)", page, re.M)}


def test_metrics_have_their_labels_and_words():
    page = REFERENCES["metrics"]()
    assert "| `deft_unanswered_frames_total` | counter | `reason` | Frames not answered |" in page
    assert "| `deft_act_seconds` | histogram |  | " in page
    assert "| `deft_recording_stops_total` | counter | `reason` | " in page


def test_every_mark_of_a_page_is_filled_and_every_text_has_a_page():
    pages = [path.read_text() for path in tracked("docs/reference/*.md")]
    asked = [name for page in pages for name in re.findall("<!-- reference: (.*) -->", page)]
    assert sorted(asked) == sorted(REFERENCES)
    assert "<!-- reference" not in filled("\n".join(pages))


def test_an_unknown_mark_is_an_error():
    with pytest.raises(KeyError, match="weather"):
        filled("<!-- reference: weather -->")


def test_no_default_is_printed_as_python_says_it():
    defaults = [row.split(" | ")[2] for row in reference_pages.settings().splitlines()[2:]]
    assert not [one for one in defaults if re.search(r"None|True|False|Enum|<|\(\)", one)]
