"""Where an evaluation's answers come from: a server with its profile's conventions around it, or a
policy in the process. Simulator frames in, robosuite actions out.

A `PolicySource` is plain data, so that it can be handed to worker processes; each of them builds
its own connection from it.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage

from deft_client.calls import HttpRequest
from deft_client.client import PolicyClient
from deft_client.errors import ProblemError, ServerUnreachableError
from deft_client.settings import DEFAULT_URL, ClientSettings
from deft_client.stream import StreamClient
from deft_core.errors import DeftError, WireError
from deft_core.image_chain import ImageChain
from deft_core.peers.conventions import (
    DEFT,
    OFT,
    OPENPI,
    OPENVLA,
    VLA0,
    ClientChain,
    Convention,
    Gripper,
    to_robosuite,
)
from deft_core.peers.openvla import oft_fields, openvla_fields
from deft_core.types import ActionChunk, ActOptions, Image, Observation, ServerInfo
from deft_libero.errors import PeerAnswerError, SelectionError
from deft_libero.evaluation.selection import load_function
from deft_libero.policies.peers import OpenPiPolicy, OpenVlaPolicy
from deft_libero.simulator.conventions import ACTION_DIM
from deft_libero.simulator.environment import Environment

PROBE_TIMEOUT_S = 2.0
OPENPI_SIZE = 224


PROFILES = {one.name: one for one in (DEFT, OPENVLA, OFT, OPENPI, VLA0)}  # that our client speaks


def check_chain(profile: Convention, info: ServerInfo | None) -> None:
    """Raise SelectionError if frames would go through an image chain on both sides.

    `info` is what a Deft server says about itself; None for the servers of other projects, which
    say nothing and leave the chain to their clients.
    """
    if info is None or profile.client_chain is ClientChain.NONE:
        return
    if info.image_chain != ClientChain.NONE.value:
        raise SelectionError(
            f"the server applies the image chain {info.image_chain!r} itself, and so would this "
            f"client with profile {profile.name!r}; start the server with another chain, or leave "
            "the frames alone here with --image-chain none"
        )


class EpisodePolicy(Protocol):
    """Who answers during an episode. Actions are in robosuite's units."""

    def start(self, session_id: str) -> None:
        """Begin an episode: what was remembered of another one is void."""

    def act(self, observation: Observation) -> ActionChunk:
        """Answer an observation."""

    def close(self) -> None:
        """Free connections."""


class ProfilePolicy:
    """A policy with its profile's conventions around it, at the far end of a network.

    Applies the client's share of the image chain, and turns answers into robosuite's units. A
    policy of this process has no profile: it answers in those units, and a call is its round trip.
    """

    def __init__(
        self, peer: EpisodePolicy, profile: Convention | None, network_delay_ms: float = 0.0
    ) -> None:
        self._peer = peer
        self._profile = profile
        self._delay_ms = network_delay_ms  # half before and half after the call

    def start(self, session_id: str) -> None:
        """Begin an episode."""
        self._peer.start(session_id)

    def act(self, observation: Observation) -> ActionChunk:
        """The actions that follow a simulator frame; the client's own work counts as preparing."""
        started = time.perf_counter()
        own_ms = 0.0
        if self._profile is not None and self._profile.client_chain is not ClientChain.NONE:
            observation = _prepared(observation, self._profile.client_chain)
            own_ms = 1000 * (time.perf_counter() - started)
        time.sleep(self._delay_ms / 2000)
        asked = time.perf_counter()
        chunk = self._peer.act(observation)
        trip_ms = chunk.timings.round_trip_ms
        if self._profile is None:
            trip_ms = 1000 * (time.perf_counter() - asked)
        time.sleep(self._delay_ms / 2000)
        timings = replace(
            chunk.timings,
            prepare_ms=chunk.timings.prepare_ms + own_ms,
            round_trip_ms=trip_ms + own_ms + self._delay_ms,
        )
        actions = chunk.actions
        if self._profile is not None:
            actions = _in_robosuite_units(actions, self._profile.gripper)
        return replace(chunk, actions=actions, timings=timings)

    def close(self) -> None:
        """Free connections."""
        self._peer.close()


def _prepared(observation: Observation, chain: ClientChain) -> Observation:
    cameras = {name: apply_chain(chain, image) for name, image in observation.cameras.items()}
    return replace(observation, image=apply_chain(chain, observation.image), cameras=cameras)


def _in_robosuite_units(actions: NDArray[np.float64], gripper: Gripper) -> NDArray[np.float64]:
    if actions.shape[1] != ACTION_DIM:
        raise PeerAnswerError(
            f"the server answers actions of {actions.shape[1]} numbers; LIBERO's robot takes "
            f"{ACTION_DIM}: is this the right policy?"
        )
    if gripper is Gripper.ROBOSUITE:
        return actions
    return to_robosuite(actions)


def apply_chain(chain: ClientChain, image: Image) -> Image:
    """One frame as the server expects it."""
    if chain is ClientChain.RESIZE_WITH_PAD:
        return resize_with_pad(image, OPENPI_SIZE)
    return ImageChain(chain.value).apply(image)


def resize_with_pad(image: Image, size: int) -> Image:
    """Scale to fit a square without distortion, bilinear, black bars around it."""
    height, width = image.shape[:2]
    scale = size / max(height, width)
    shape = (max(1, round(width * scale)), max(1, round(height * scale)))
    resized = PillowImage.fromarray(image).resize(shape, PillowImage.Resampling.BILINEAR)
    square = PillowImage.new("RGB", (size, size))
    square.paste(resized, ((size - shape[0]) // 2, (size - shape[1]) // 2))
    return np.asarray(square)


@dataclass(frozen=True)
class PolicySource:
    """How to reach the policy and what to ask of it.

    `stream` sends observations to a Deft server through its WebSocket.
    `factory` names a policy in the worker's own process (see `load_function`), empty for a server.
    `network_delay_ms` is added to every round trip, half before and half after.
    """

    url: str = DEFAULT_URL
    profile: Convention = DEFT
    options: ActOptions = field(default_factory=lambda: ActOptions(want_trace=True))
    settings: ClientSettings = field(default_factory=ClientSettings)
    stream: bool = False
    factory: str = ""
    network_delay_ms: float = 0.0

    @property
    def name(self) -> str:
        """What reports call a policy of the worker's own process; empty for a server."""
        return self.factory.rpartition(":")[2]


def build_policy(source: PolicySource, environment: Environment) -> EpisodePolicy:
    """Connect; nothing is sent before the first episode starts."""
    if source.factory:
        peer: EpisodePolicy = load_function(source.factory, "--local-policy")(environment)
        return ProfilePolicy(peer, None, source.network_delay_ms)
    return ProfilePolicy(_build_peer(source), source.profile, source.network_delay_ms)


def _build_peer(source: PolicySource) -> EpisodePolicy:
    settings, key = source.settings, source.options.statistics_key
    if source.profile.name == "openvla":
        return OpenVlaPolicy(source.url, lambda one: openvla_fields(one, key), settings)
    if source.profile.name == "oft":
        return OpenVlaPolicy(source.url, oft_fields, settings)
    if source.profile.name == "openpi":
        return OpenPiPolicy(source.url, settings)
    # An episode whose connection broke is played again: frames of its session may be lost, or two.
    retries = replace(source.settings.retries, only_when_overloaded=True)
    client_class = StreamClient if source.stream else PolicyClient
    client = client_class(source.url, replace(source.settings, retries=retries))
    executed = source.profile.executed_steps
    return DeftPolicy(client, replace(source.options, executed_steps=executed))


def describe_server(source: PolicySource) -> ServerInfo | None:
    """What the server says about itself; None for servers of other projects, which do not.

    Raises what the client raises when there is no server.
    """
    if source.factory:
        load_function(source.factory, "--local-policy")  # better now than in every worker
        return None
    with PolicyClient(source.url, source.settings) as client:
        try:
            return client.info()
        except DeftError as error:
            if source.profile.asks_deft or isinstance(error, ServerUnreachableError):
                raise
            return None


def check_server(source: PolicySource) -> None:
    """Return if the server would answer an observation now; raise DeftError otherwise."""
    if source.factory:
        return
    if source.profile.asks_deft:
        timeouts = replace(
            source.settings.timeouts, connect_s=PROBE_TIMEOUT_S, answer_s=PROBE_TIMEOUT_S
        )
        with PolicyClient(source.url, replace(source.settings, timeouts=timeouts)) as client:
            client.ping()
        return
    parts = urlsplit(source.url)
    url = f"http{'s' if parts.scheme in ('https', 'wss') else ''}://{parts.netloc}"
    with (
        PolicyClient(url, source.settings) as client,
        suppress(ProblemError, WireError),  # any answer will do: somebody is there
    ):
        gives_up_at = time.monotonic() + PROBE_TIMEOUT_S
        client.ask(HttpRequest("GET", "/", gives_up_at), attempts=1)


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
