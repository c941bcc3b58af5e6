"""A typing error on a command line is answered without loading torch, which takes seconds."""

import subprocess
import sys

import pytest

TELL = """
import sys
from deft_server.__main__ import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
print("loaded:", sorted(one for one in ("torch", "transformers", "ray") if one in sys.modules))
raise SystemExit(code)
"""


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("bnech", 2, "did you mean bench?"),
        ("serve --decodign lossless", 2, "did you mean --decoding?"),
        ("doctor --demonstraton x", 2, "did you mean --demonstration?"),
        ("act --decodign lossless", 2, "did you mean --decoding?"),
        ("bench --decodign lossless", 2, "did you mean --decoding?"),
        ("bench --decoding losless", 1, "losless"),
        ("replay --decodign lossless", 2, "replay"),
        ("train evaluat", 2, "did you mean evaluate?"),
        ("train fit --ouut x", 2, "--out"),
        ("train evaluate --heads x", 2, "evaluate"),
    ],
)
def test_it_costs_no_import_of_torch(command: str, code: int, told: str) -> None:
    words = [sys.executable, "-c", TELL, *command.split()]
    found = subprocess.run(words, capture_output=True, text=True)
    assert found.returncode == code, found.stderr
    assert told in found.stderr
    assert "loaded: []" in found.stdout
