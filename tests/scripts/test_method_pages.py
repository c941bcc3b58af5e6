"""The pages of the methods are made of the methods' files, and are current."""

import pytest

from deft_policies.decoding.methods import presets
from deft_policies.decoding.plugins import from_files, method_files
from scripts import method_pages


def test_the_pages_are_current() -> None:
    """Write them with `python -m scripts.method_pages`."""
    wanted = method_pages.pages()
    assert {path for path in wanted if path.parent == method_pages.FOLDER} == {
        *method_pages.FOLDER.glob("*.md")
    }
    for path, text in wanted.items():
        assert path.read_text(encoding="utf-8") == text, path


def test_every_name_stands_on_the_page_of_decoding() -> None:
    page = method_pages.PAGE.read_text(encoding="utf-8")
    assert not [name for name in (*presets(), *from_files("RULES")) if f"`{name}`" not in page]


@pytest.mark.parametrize("name", method_files())
def test_a_file_says_what_it_is_and_where_its_numbers_are(name: str) -> None:
    words = method_files()[name].__doc__ or ""
    title, idea = words.split("\n\n")[0].replace("\n", " ").split(": ", 1)
    assert title
    assert idea.endswith(".")
    assert words.strip().split("\n\n")[-1].startswith("Numbers: ")


def test_a_page_that_was_edited_by_hand_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = method_pages.pages()
    changed = method_pages.FOLDER / "fly.md"
    edited[changed] += "more"
    monkeypatch.setattr(method_pages, "pages", lambda: edited)
    monkeypatch.setattr("sys.argv", ["method_pages", "--check"])
    with pytest.raises(SystemExit) as ended:
        method_pages.main()
    assert ended.value.code
    assert capsys.readouterr().out == "docs/methods/fly.md\n"
