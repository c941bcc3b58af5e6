"""What people type: which program answers, whether it knows the words, what it says comes next."""

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Sequence
from importlib import import_module

import pytest

MODULES = {"deft": "deft_server.__main__", "deft-client": "deft_client.__main__"}


def main_of(program: str) -> Callable[[list[str]], int]:
    """What runs when its name is typed."""
    main: Callable[[list[str]], int] = import_module(
        MODULES.get(program, f"{program}.__main__")
    ).main
    return main


def assert_known(words: Sequence[str]) -> None:
    """Every flag among the words is in the help of that very command."""
    if list(words[:2]) == ["python", "-m"]:
        words = words[2:]
    program, *arguments = words
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as ended:
        main_of(program)([*arguments, "--help"])
    assert ended.value.code == 0
    for flag in (word.partition("=")[0] for word in arguments if word.startswith("--")):
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", shown.getvalue()), f"no {flag} in the help"


def next_command(shown: str) -> list[str]:
    """The words that the last line says to type next, which the program knows."""
    last = shown.rstrip().rpartition("\n")[2]
    assert last.startswith("next: "), shown
    words = shlex.split(last.removeprefix("next: "))
    assert_known(words)
    return words
