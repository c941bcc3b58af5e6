from pathlib import Path

import numpy as np
import pytest

from deft_client.calls import next_pause_s
from deft_client.errors import ServerUnreachableError, problem_error
from deft_client.settings import Retries
from deft_core.errors import DeftError, Problem
from deft_core.types import ActOptions, Observation
from deft_core.wire.limits import WireLimits
from deft_libero.evaluation.player import Player
from deft_libero.evaluation.point_world import SUITE, find_suite, open_environment
from deft_libero.evaluation.runs import RunConfig
from deft_libero.policies.source import PolicySource, build_policy
from deft_libero.results.records import TrialKey
from deft_libero.simulator.environment import EnvironmentSettings
from tests.standins.tiny_server import tiny_server


def test_an_episode_ends_where_its_connection_breaks() -> None:
    """The server may have taken the frame in, or been started anew and know nothing of the session.

    The client used to ask again, so that a session had one frame too many, or went on in a server
    that had forgotten it: kill -9 of a server that came back within 0.3 s changed actions.
    """
    world = open_environment(find_suite(SUITE).task(0), EnvironmentSettings())
    observation = Observation(np.zeros((256, 256, 3), np.uint8), "push the point left")
    with tiny_server() as server:
        policy = build_policy(PolicySource(server.url), world)
        policy.start("one")
        policy.act(observation)
        server.drops = 1
        with pytest.raises(ServerUnreachableError):
            policy.act(observation)
        assert server.frames["one"] == 2
        policy.close()


@pytest.mark.parametrize(
    ("failure", "is_asked_again"),
    [
        (problem_error(Problem(429, "Overloaded")), True),
        (problem_error(Problem(503, "Not ready")), False),  # it may just have been started
        (ServerUnreachableError("gone"), False),
    ],
)
def test_only_a_server_that_is_busy_is_asked_again(
    failure: DeftError, is_asked_again: bool
) -> None:
    pause_s = next_pause_s(failure, 1, Retries(only_when_overloaded=True))
    assert (pause_s is not None) == is_asked_again
    assert next_pause_s(failure, 1, Retries()) is not None


def test_no_two_tries_share_a_session(tmp_path: Path) -> None:
    """Two evaluations of a suite against one server used to send the frames of one session."""
    with tiny_server() as server:
        for parent in ("first", "second"):
            source, out = PolicySource(server.url), tmp_path / parent
            config = RunConfig(SUITE, source, simulator=SUITE, step_limit=2, out=out)
            player = Player(config, lambda report: None)
            player.play(TrialKey(SUITE, 0, 0))
            player.close()
        sessions = [request.options.session_id for request in server.requests]
    assert len(sessions) == 4
    assert len(set(sessions)) == 2


def test_a_long_method_makes_no_session_that_a_server_refuses(tmp_path: Path) -> None:
    method = "fly:" + ",".join(f"window=1{number}" for number in range(1, 10))
    with tiny_server() as server:
        source = PolicySource(server.url, options=ActOptions(decoding=method))
        config = RunConfig(SUITE, source, simulator=SUITE, step_limit=1, out=tmp_path)
        player = Player(config, lambda report: None)
        player.play(TrialKey(SUITE, 0, 0))
        player.close()
        (request,) = server.requests
    assert request.options.session_id is not None
    assert len(request.options.session_id) <= WireLimits().max_name_chars
