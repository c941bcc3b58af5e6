"""Where an evaluation's answers come from: a server of some profile, or a policy in the process.

A `PolicySource` is plain data, so that it can be handed to worker processes; each of them builds
its own connection from it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import httpx

from deft_client.client import PolicyClient, transport_error
from deft_client.errors import DeftError, ServerUnreachableError
from deft_client.libero.evaluation.selection import load_function
from deft_client.libero.policies.openpi import OpenPiPolicy
from deft_client.libero.policies.openvla import OftServerPolicy, OpenVlaPolicy
from deft_client.libero.policies.profiles import (
    PROFILES,
    EpisodePolicy,
    Profile,
    ProfilePolicy,
    Protocol,
)
from deft_client.libero.simulator.environment import Environment
from deft_client.settings import DEFAULT_URL, ClientSettings
from deft_client.stream import StreamClient
from deft_client.types import ActionChunk, ActOptions, Observation, ServerInfo

PROBE_TIMEOUT_S = 2.0

PolicyFactory = Callable[[Environment], EpisodePolicy]


@dataclass(frozen=True)
class PolicySource:
    """How to reach the policy and what to ask of it.

    `stream` sends observations to a Deft server through its WebSocket.
    `factory` names a policy in the worker's own process (see `load_function`), empty for a server;
    `name` is what reports call that policy.
    `network_delay_ms` is added to every round trip, half before and half after.
    """

    url: str = DEFAULT_URL
    profile: Profile = PROFILES["deft"]
    options: ActOptions = field(default_factory=lambda: ActOptions(want_trace=True))
    settings: ClientSettings = field(default_factory=ClientSettings)
    stream: bool = False
    factory: str = ""
    name: str = ""
    network_delay_ms: float = 0.0


def build_policy(source: PolicySource, environment: Environment) -> EpisodePolicy:
    """Connect; nothing is sent before the first episode starts."""
    if source.factory:
        factory: PolicyFactory = load_function(source.factory, "--policy")
        return ProfilePolicy(factory(environment), None, source.network_delay_ms)
    return ProfilePolicy(_build_peer(source), source.profile, source.network_delay_ms)


def _build_peer(source: PolicySource) -> EpisodePolicy:
    settings, key = source.settings, source.options.statistics_key
    if source.profile.protocol is Protocol.OPENVLA:
        return OpenVlaPolicy(source.url, key, settings)
    if source.profile.protocol is Protocol.OFT:
        return OftServerPolicy(source.url, None, settings)
    if source.profile.protocol is Protocol.OPENPI:
        return OpenPiPolicy(source.url, settings)
    # An episode whose connection broke is played again: frames of its session may be lost, or two.
    retries = replace(source.settings.retries, only_when_overloaded=True)
    client_class = StreamClient if source.stream else PolicyClient
    client = client_class(source.url, replace(source.settings, retries=retries))
    return DeftPolicy(client, source.options)


def describe_server(source: PolicySource) -> ServerInfo | None:
    """What the server says about itself; None for servers of other projects, which do not.

    Raises what the client raises when there is no server.
    """
    if source.factory:
        load_function(source.factory, "--policy")  # better now than in every worker
        return None
    with PolicyClient(source.url, source.settings) as client:
        if source.profile.protocol is Protocol.DEFT:
            return client.info()
        try:
            return client.info()
        except ServerUnreachableError:
            raise
        except DeftError:
            return None


def check_server(source: PolicySource) -> None:
    """Return if the server would answer an observation now; raise DeftError otherwise."""
    if source.factory:
        return
    if source.profile.protocol is Protocol.DEFT:
        timeouts = replace(
            source.settings.timeouts, connect_s=PROBE_TIMEOUT_S, answer_s=PROBE_TIMEOUT_S
        )
        with PolicyClient(source.url, replace(source.settings, timeouts=timeouts)) as client:
            client.ping()
        return
    parts = urlsplit(source.url)
    url = f"http{'s' if parts.scheme in ('https', 'wss') else ''}://{parts.netloc}/"
    try:
        httpx.get(url, timeout=PROBE_TIMEOUT_S)  # any answer will do: somebody is there
    except httpx.TransportError as error:
        raise transport_error(error, source.url) from error


class DeftPolicy:
    """A Deft server: one session per episode, traces with every answer."""

    def __init__(self, client: PolicyClient, options: ActOptions) -> None:
        self._client = client
        self._options = options

    def start(self, session_id: str) -> None:
        """Open a session that knows nothing of earlier episodes."""
        self._options = replace(self._options, session_id=session_id)
        self._client.reset(session_id)

    def act(self, observation: Observation) -> ActionChunk:
        """Ask for the actions that follow an observation."""
        return self._client.act(observation, self._options)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
