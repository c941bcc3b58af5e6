"""Ray is for those who ask for it."""

import re
import subprocess
import sys

from tests.repository import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from deft_server.__main__ import main
sys.exit(main(["serve", "--policy", "constant", "--replicas", "2"]))
"""


def test_without_the_extra_replicas_are_refused_with_the_line_that_installs_it():
    run = subprocess.run([sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr == 'deft serve: replicas need Ray: pip install "deft-vla[ray]"\n'


def test_only_the_extra_brings_ray():
    for file, extra in (("pyproject.toml", "deft-vla"), ("client/pyproject.toml", "deft-client")):
        project = tomllib.loads((ROOT / file).read_text())["project"]
        assert project["name"] == extra
        extras = {name for name, needs in project["optional-dependencies"].items()
                  if any(re.match(r"ray\b", one) for one in needs)}  # fmt: skip
        assert extras == {"ray"}
        assert not any(one.startswith("ray") for one in project["dependencies"])
