from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from deft_draft_training.config import load_config, plain
from deft_draft_training.errors import ConfigError


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    steps: int
    inner: Inner = field(default_factory=Inner)
    colour: Colour = Colour.RED
    folder: str = ""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_toml_becomes_nested_dataclasses(tmp_path):
    path = write(tmp_path, 'steps = 3\ncolour = "blue"\n[inner]\nrate = 1\nnames = ["a"]\n')
    loaded = load_config(Outer, path)
    assert loaded == Outer(3, Inner(1.0, ("a",)), Colour.BLUE)
    assert isinstance(loaded.inner.rate, float)


def test_overrides_win_over_the_file(tmp_path):
    path = write(tmp_path, "steps = 3\n")
    loaded = load_config(Outer, path, ["steps=5", "inner.rate=0.25", "colour=blue", "folder=/a"])
    assert loaded == Outer(5, Inner(0.25), Colour.BLUE, "/a")


@dataclass(frozen=True)
class Recipe:
    deep: Outer = field(default_factory=lambda: Outer(7, Inner(0.1, ("a",))))


def test_a_group_named_in_part_keeps_the_rest_of_its_own_defaults():
    """Once `deep.inner.rate` alone reset `deep.inner.names` to what any `Inner` has."""
    loaded = load_config(Recipe, None, ["deep.inner.rate=0.2"])
    assert loaded == Recipe(Outer(7, Inner(0.2, ("a",))))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 3\nstepz = 4\n", "stepz.*did you mean steps"),
        ("steps = 3\n[inner]\nrat = 1\n", "inner.rat: unknown field"),
        ("steps = 'three'\n", "steps: .* 'three'"),
        ("steps = true\n", "steps: .* True"),
        ("colour = 'red'\n", "steps: missing"),
        ("steps = 3\ncolour = 'green'\n", "red, blue, got text 'green'"),
        ("steps = 3\ninner = 4\n", "inner: must be a map"),
        ("steps = \n", "is not TOML"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(Outer, write(tmp_path, text))


def test_a_missing_file_and_a_bad_override_say_what_is_wrong(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(Outer, tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="not of the form"):
        load_config(Outer, None, ["steps"])


def test_plain_values_build_the_same_configuration_again(tmp_path):
    config = Outer(3, Inner(1.0, ("a", "b")), Colour.BLUE, "/x")
    assert plain(config) == {
        "steps": 3,
        "inner": {"rate": 1.0, "names": ["a", "b"]},
        "colour": "blue",
        "folder": "/x",
    }
