"""Replicas as a Ray Serve deployment. The only place that knows Ray, imported where it is used.

Ray places the replicas, restarts those that die or hang, and replaces them one by one when a new
version is deployed. Frames do not pass through Ray's proxies: our own server holds the handle.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from deft_policies.base import PolicyRequest
from deft_server.errors import NotReadyError
from deft_server.replicas.front import ReplicaHangsError, ReplicaLostError
from deft_server.replicas.replica import Backlogs, FrontState, Replica, ReplicaAnswer
from deft_server.serving.hosting import HostedPolicy, LoadPolicy
from deft_server.settings import Settings, SettingsError

APPLICATION = "deft"
DEPLOYMENT = "PolicyReplica"
HEALTH_EVERY_S = 2.0
# Replicas are added within seconds of frames having to wait, and taken away when they are not
# needed for minutes: loading a policy takes longer than a batch by far.
SCALING = {"look_back_period_s": 10.0, "upscale_delay_s": 5.0, "downscale_delay_s": 120.0}
BUSY_SHARE = 0.8  # of the replicas, in the long run
# How Ray's own documentation says to serve where latency counts; read when Ray is imported. The
# processes of a cluster need the same, see deploy/ray.
ENVIRONMENT = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Nobody calls a replica over HTTP; with it, every replica that stops first waits for half a
    # minute in case somebody does.
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    # A batch may come a moment before its replica knows that the one before is answered, and is
    # sent again. Ray would wait for 25 ms to 0.5 s with that.
    "RAY_SERVE_ROUTER_RETRY_INITIAL_BACKOFF_S": "0.001",
    "RAY_SERVE_ROUTER_RETRY_MAX_BACKOFF_S": "0.01",
    # Ray runs its workers at a niceness of 15: beside anything else a replica would starve.
    "RAY_worker_niceness": "0",
}

logger = logging.getLogger(__name__)


class PolicyReplica:
    """One replica, as Ray calls it."""

    def __init__(self, load: LoadPolicy, version: str, hang_after_s: float, max_batch: int) -> None:
        from ray import serve

        name = str(serve.get_replica_context().rank.rank)
        self._hang_after_s = hang_after_s
        self._max_batch = max_batch
        self._replica = Replica(load, version, name)
        self._backlogs = Backlogs()

    async def look(self) -> tuple[str, HostedPolicy]:
        """Return the version of the policy, and what a server has to know of it."""
        return self._replica.version, self._replica.facts

    async def answer(self, ask: PolicyRequest, state: FrontState) -> ReplicaAnswer:
        """Answer a frame, in the same rounds as those that are here."""
        self._backlogs.note(state, time.monotonic())
        return await self._replica.answer(ask, state)

    def check_health(self) -> None:
        """Raise where the policy hangs: Ray then starts another replica in its place."""
        since_s = self._replica.busy_since_s
        if since_s is not None and time.monotonic() - since_s > self._hang_after_s:
            raise NotReadyError(f"a round took over {self._hang_after_s:g} s")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Ray what `replicas_wanted` needs to know."""
        busy = min(1.0, self._replica.num_frames / self._max_batch)
        return {"waiting": self._backlogs.total(time.monotonic()), "busy": busy}


def scaling(least: int, most: int) -> dict[str, object]:
    """Return what Ray has to know to scale by waiting frames between these bounds."""
    policy = {"policy_function": f"{__name__}:{replicas_wanted.__name__}"}
    return {"min_replicas": least, "max_replicas": most, **SCALING, "policy": policy}


def replicas_wanted(context: Any) -> tuple[int, dict[str, object]]:
    """Scale by frames: one replica for each full batch that is at one, or waits at a front.

    Ray calls it with its `AutoscalingContext`, and keeps the answer within the bounds it was given.
    """
    metrics = context.aggregated_metrics or {}
    waiting = max(metrics.get("waiting", {}).values(), default=0.0)
    busy = sum(metrics.get("busy", {}).values())
    return math.ceil((busy + waiting) / BUSY_SHARE), {}


def build_application(load: LoadPolicy, version: str, settings: Settings) -> Any:
    """Return the Serve application; `serve.run` and Serve's own configuration take it."""
    from ray import serve

    least = settings.replicas or 1
    size: dict[str, object] = {"num_replicas": least}
    if settings.most_replicas is not None:
        size = {"autoscaling_config": scaling(least, settings.most_replicas)}
    options = serve.deployment(
        name=DEPLOYMENT,
        **size,
        max_ongoing_requests=settings.max_batch,
        max_surge_percent=int(settings.replica_surge),  # rounded up: one replica more
        health_check_period_s=HEALTH_EVERY_S,
        ray_actor_options={
            "num_cpus": settings.replica_cpus,
            "num_gpus": settings.replica_gpus,
        },
    )
    return options(PolicyReplica).bind(load, version, settings.hang_after_s, settings.max_batch)


class RayCluster:
    """A `Cluster`: replicas that were there already, or so many of a policy as the settings say."""

    def __init__(self, settings: Settings, load: LoadPolicy, version: str) -> None:
        self._settings = settings
        self._load = load
        self._version = version
        self._handle: Any = None
        self._errors: tuple[type[Exception], ...] = ()

    def connect(self) -> None:
        """Reach the cluster, or start one here, and have the replicas run."""
        ray, serve = import_ray()
        self._errors = (ray.exceptions.RayError, serve.exceptions.RayServeException)
        try:
            self._start(ray, serve)
        except (ConnectionError, RuntimeError, ValueError, *self._errors) as error:
            cluster = self._settings.ray or "this machine"
            reason = _reason(error, is_remote=self._settings.ray is not None)
            raise SettingsError(f"no replicas on {cluster}: {reason}") from error

    async def look(self) -> tuple[str, HostedPolicy]:
        """Ask a replica what the policy is."""
        try:
            policy: tuple[str, HostedPolicy] = await self._handle.look.remote()
        except self._errors as error:
            raise ReplicaLostError(_first_line(error)) from error
        return policy

    async def answer(self, ask: PolicyRequest, state: FrontState) -> ReplicaAnswer:
        """Have a replica that has a place answer, however long it takes: hangs end the replica."""
        began_s = time.monotonic()
        response = self._handle.answer.remote(ask, state)
        try:
            answer: ReplicaAnswer = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except self._errors as error:
            took_s = time.monotonic() - began_s
            is_late = took_s > self._settings.hang_after_s
            kind = ReplicaHangsError if is_late else ReplicaLostError
            raise kind(f"{_first_line(error)}, after {took_s:.1f} s") from error
        return answer

    def count(self) -> int:
        """Return how many replicas are running."""
        _, serve = import_ray()
        application = serve.status().applications.get(APPLICATION)
        if application is None:
            return 0
        return int(application.deployments[DEPLOYMENT].replica_states.get("RUNNING", 0))

    def close(self) -> None:
        """Leave the cluster. One that was started here ends; on another the replicas stay."""
        import_ray()[0].shutdown()

    def _start(self, ray: Any, serve: Any) -> None:
        settings, cpus = self._settings, None
        most = settings.most_replicas or settings.replicas
        if settings.ray is None and most is not None:
            cpus = max(os.cpu_count() or 1, int(most * settings.replica_cpus + 1))
        if not ray.is_initialized():
            ray.init(
                address=settings.ray or "local",
                num_cpus=cpus,
                include_dashboard=None if settings.ray else False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                configure_logging=False,
            )
        serve.start(proxy_location="Disabled")
        if settings.replicas is None:
            self._handle = serve.get_app_handle(APPLICATION)
        else:
            application = build_application(self._load, self._version, settings)
            self._handle = serve.run(application, name=APPLICATION, route_prefix=None)


def import_ray() -> tuple[Any, Any]:
    """Return `ray` and `ray.serve`, or raise `SettingsError` where the extra is not installed."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise SettingsError(
            'replicas need Ray: in a clone of Deft, pip install ".[ray]"'
        ) from error
    return ray, serve


def _reason(error: Exception, is_remote: bool) -> str:
    """Return why a cluster could not be reached; Ray says little where a token is missing."""
    reason = str(error)
    if not is_remote:
        return reason
    return (
        f"{reason}; where the cluster has a token, this machine needs RAY_AUTH_MODE=token and the "
        "token in ~/.ray/auth_token or RAY_AUTH_TOKEN: `ray get-auth-token` prints it on the "
        "cluster's first machine (docs/scaling.md)"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def application(arguments: Mapping[str, str]) -> Any:
    """Build the application from the `args` of a Serve configuration: `policy` and its flags.

    `version` marks a change that the flags do not show, such as new files in the same folder.
    """
    from deft_server.commands.settings_sources import policy_of_flags

    given = dict(arguments)
    version = given.pop("version", "")
    command = policy_of_flags(given)
    version = f"{version} {sorted(given.items())}".strip()
    return build_application(command.load, version, Settings())
