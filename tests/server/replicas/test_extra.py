"""Ray is for those who ask for it."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from deft_policies.constant import ConstantPolicy
from deft_server.replicas import ray_serve
from deft_server.settings import Settings, SettingsError
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


def test_replicas_without_ray_name_the_line_to_install():
    run = subprocess.run([sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True)
    assert run.returncode == 2
    assert 'in a clone of Deft, pip install ".[ray]"' in run.stderr


def test_only_the_extra_brings_ray():
    for file, extra in (("pyproject.toml", "deft-vla"), ("client/pyproject.toml", "deft-client")):
        project = tomllib.loads((ROOT / file).read_text())["project"]
        assert project["name"] == extra
        extras = {name for name, needs in project["optional-dependencies"].items()
                  if any(re.match(r"ray\b", one) for one in needs)}  # fmt: skip
        assert extras == {"ray"}
        assert not any(one.startswith("ray") for one in project["dependencies"])


@pytest.mark.parametrize(
    "said", ["Token authentication is enabled but no token was found", "Failed to connect to Ray"]
)
def test_a_cluster_that_wants_its_token_says_where_it_goes(said, monkeypatch):
    class Authentication(Exception):
        """As Ray raises it: no `ConnectionError`."""

    def init(**_):
        raise Authentication(said)

    exceptions = SimpleNamespace(RayError=Authentication, RayServeException=ZeroDivisionError)
    ray = SimpleNamespace(init=init, is_initialized=lambda: False, exceptions=exceptions)
    monkeypatch.setattr(ray_serve, "import_ray", lambda: (ray, ray))
    cluster = ray_serve.RayCluster(Settings(ray="10.0.0.5:6379"), ConstantPolicy, "1")
    with pytest.raises(SettingsError, match=r"10\.0\.0\.5.*RAY_AUTH_MODE=token.*ray/auth_token"):
        cluster.connect()
