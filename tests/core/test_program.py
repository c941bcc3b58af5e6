"""What a command says that cannot run."""

import sys

import pytest

from deft_core.program import Command, Program


@pytest.mark.parametrize(
    ("requirement", "hint"),
    [
        ("deft-client[datasets]", "pip install './client[datasets]'"),
        ("deft-vla", "pip install ./client ."),
        ("deft-vla[ray]", "pip install ./client '.[ray]'"),
    ],
)
def test_a_missing_package_names_what_a_clone_installs(requirement, hint, monkeypatch, capsys):
    """No index has these packages: whoever registered their names would be run by every user."""
    monkeypatch.setitem(sys.modules, "missing_package", None)
    program = Program("deft", {"go": Command("missing_package", "")}, requirement)
    assert program.run(["go"]) == 1
    missing, remedy = capsys.readouterr().err.splitlines()
    assert "the package missing_package is not installed" in missing
    assert hint in remedy


def test_an_interrupted_command_says_what_became_of_it(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt("saved at step 7")

    monkeypatch.setitem(sys.modules, "interrupted", type(sys)("interrupted"))
    sys.modules["interrupted"].main = interrupted
    program = Program("deft", {"go": Command("interrupted", "")}, "deft-vla", (), "stopped")
    assert program.run(["go"]) == 130
    assert capsys.readouterr().err == "saved at step 7\n"
