"""Ray is for those who ask for it; and how our side calls it, with a stand-in for Ray."""

import asyncio
import re
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest

from deft_policies.base import PolicyRequest
from deft_policies.constant import ConstantPolicy
from deft_server.replicas import ray_serve
from deft_server.replicas.front import ReplicaHangsError, ReplicaLostError
from deft_server.replicas.replica import FrontState
from deft_server.settings import Settings, SettingsError
from tests.repository import ROOT
from tests.standins.policies import frame

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


def test_what_a_server_needs_is_no_extra():
    """`pip install deft-vla` gave a command that could not serve."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=;\[]", one)[0].strip() for one in project["dependencies"]}
    assert needed >= {"deft-client", "fastapi", "uvicorn", "websockets", "torch", "tokenizers"}


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


class Died(Exception):
    """As Ray says that a replica was ended."""


class Response:
    """What Ray's handle returns: waited for, and cancelled apart from whoever waits."""

    def __init__(self, error: Exception | None = None, after_s: float = 0.0) -> None:
        self.error, self.after_s, self.is_cancelled = error, after_s, False

    def __await__(self):
        yield from asyncio.sleep(self.after_s).__await__()
        if self.error is None:
            yield from asyncio.get_running_loop().create_future()  # for ever
        raise self.error

    def cancel(self) -> None:
        self.is_cancelled = True


def cluster_that_returns(response: Response, hang_after_s: float = 60.0) -> ray_serve.RayCluster:
    cluster = ray_serve.RayCluster(Settings(hang_after_s=hang_after_s), ConstantPolicy, "1")
    call = SimpleNamespace(remote=lambda *_: response)
    cluster._handle, cluster._errors = SimpleNamespace(answer=call), (Died,)
    return cluster


ASKED = PolicyRequest(frame()), FrontState("front", ("1",), 0)


def test_a_frame_that_is_given_up_is_cancelled_in_ray_too():
    async def story() -> bool:
        response = Response()
        waiting = asyncio.create_task(cluster_that_returns(response).answer(*ASKED))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return response.is_cancelled

    assert asyncio.run(story())


@pytest.mark.parametrize(
    ("hang_after_s", "kind"), [(60, ReplicaLostError), (1e-6, ReplicaHangsError)]
)
def test_a_replica_that_ends_after_long_work_is_taken_for_one_that_hung(hang_after_s, kind):
    async def story() -> None:
        response = Response(Died("killed"), after_s=0.001)
        await cluster_that_returns(response, hang_after_s).answer(*ASKED)

    with pytest.raises(ReplicaLostError, match="Died: killed, after 0") as raised:
        asyncio.run(story())
    assert type(raised.value) is kind
