"""`deft serve`: load a policy and answer observations until it is stopped."""

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from pathlib import Path
from shlex import quote

import uvicorn

from deft_core.program import CommandParser
from deft_core.types import ServerInfo
from deft_policies.commands.parse import PolicyCommand, load_by_words, target_flags
from deft_policies.errors import PolicyError
from deft_server.app import DeftApp, create_app
from deft_server.commands.logs import end_logging, start_logging
from deft_server.commands.settings_sources import read_command
from deft_server.http.connections import build_http_protocol, build_websocket_protocol
from deft_server.replicas.front import ReplicaHost
from deft_server.replicas.ray_serve import RayCluster, import_ray
from deft_server.serving.access import KeyFileError
from deft_server.serving.hosting import RemotePolicy
from deft_server.serving.lifecycle import ServerPhase
from deft_server.settings import Settings, SettingsError, is_loopback

SWITCH_INTERVAL_S = 0.0005
EXAMPLE = Path(__file__).parents[1] / "dashboard" / "static" / "example.png"
MAX_DIGITS = 640  # of an integer in JSON; reading more takes time that grows with the square
BACKLOG = 256  # so many connections at most are begun in one turn of the event loop
TICKS_A_SECOND = 10  # of uvicorn
LAST_WORDS_S = 5  # for responses on their way out once all frames are answered
_KEPT_BYTES = 16 * 1024 * 1024
_LARGEST_KEPT_BYTES = 4 * 1024 * 1024  # frames of cameras; what is larger is given back at once
_NUM_ARENAS = 1  # each keeps what was freed in it, and the interpreter lets one thread run
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

logger = logging.getLogger(__name__)


class ExitCode(IntEnum):
    """How `deft serve` ends."""

    STOPPED = 0
    BAD_SETTINGS = 2
    POLICY_BROKEN = 3
    POLICY_HANGS = 4


def main(arguments: list[str]) -> int:
    """Serve; return the exit code."""
    parser = CommandParser(
        prog="deft serve",
        usage="%(prog)s [-h] [--config FILE] [--policy NAME] [SETTINGS] [FLAGS OF THE POLICY]",
        allow_abbrev=False,
        description="Answer observations over HTTP and WebSocket.",
    )
    try:
        policy, settings = read_command(parser, arguments, os.environ)
        code = run(build_app(policy, settings))
    except (SettingsError, PolicyError, KeyFileError) as error:
        sys.stderr.write(f"deft serve: {error}\n")
        return ExitCode.BAD_SETTINGS
    if code is ExitCode.POLICY_HANGS:
        os._exit(code)  # its thread might keep the interpreter from ending
    if settings.record is not None and sys.stderr.isatty():
        flags = target_flags(policy.namespace)
        sys.stderr.write(f"next: deft replay {quote(str(settings.record))} {flags}\n")
    return code


def build_app(policy: PolicyCommand, settings: Settings) -> DeftApp:
    """Build the app around a policy of this machine, or around replicas of it."""
    load = partial(load_by_words, *policy.words)
    if settings.replicas is None and settings.ray is None:
        return create_app(load, settings)
    import_ray()
    cluster = RayCluster(settings, load, _version(policy))
    return create_app(RemotePolicy(partial(ReplicaHost, cluster)), settings)


def _version(policy: PolicyCommand) -> str:
    """Return what tells one deployment from another: the flags of its policy."""
    ours = {*Settings.model_fields, "config"}
    return str(
        sorted(
            (name, str(value)) for name, value in vars(policy.namespace).items() if name not in ours
        )
    )


def run(app: DeftApp) -> ExitCode:
    """Serve an app until a signal, or until its policy is beyond help; raise `SettingsError`."""
    settings = app.service.settings
    config = _uvicorn_config(app, settings)
    listening = listen(settings)
    _allow_many_connections(settings.max_connections)
    # A policy that computes in Python shares the interpreter with the event loop; the usual 5 ms
    # between turns would add up to tens of milliseconds for a single /healthz.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sys.set_int_max_str_digits(MAX_DIGITS)
    keep_freed_memory()
    log = start_logging(settings)
    url = _url(settings, listening)
    server = _Server(config, app, url)
    logger.info("listening on %s", url)
    if not (is_loopback(settings.host) or settings.trusted_proxies):
        logger.warning(
            "%s is reached without a proxy: floods of connections and slow TLS handshakes are not "
            "this process's to bear; put nginx before it (deploy/nginx, docs/security.md)",
            settings.host,
        )
    server.run(sockets=[listening])
    logger.info("stopped with exit code %d", server.exit_code)
    if not end_logging(log, LAST_WORDS_S):
        os._exit(server.exit_code)  # the interpreter's own end would wait for the log, too
    return server.exit_code


def welcome(info: ServerInfo, settings: Settings, url: str) -> str:
    """What a terminal shows once frames are answered."""
    rows = {"model": f"{info.policy}, answers with {info.action_dim} numbers"}
    known = info.details
    rows |= {name: known[name] for name in ("weights", "device", "dtype") if name in known}
    rows["method"] = f"{info.decoding}; --decoding chooses another"
    rows["statistics"] = info.default_statistics_key or "each request names one"
    rows["address"] = url
    if settings.dashboard:
        rows["dashboard"] = f"{url}/dashboard"
    rows["api"] = f"{url}/docs"
    key = " -H 'Authorization: Bearer KEY'" if settings.keys_file else ""
    asked = quote((*info.instructions, "what the robot is to do")[0])
    rows["try"] = f"curl{key} -F image=@{quote(str(EXAMPLE))} -F instruction={asked} {url}/v1/act"
    lines = [f"  {name:<11} {text}\n" for name, text in rows.items()]
    return f"\nDeft is ready; Ctrl-C ends it\n{''.join(lines)}\n"


def listen(settings: Settings) -> socket.socket:
    """Return a socket that listens where the settings say, or raise `SettingsError`."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol named, asyncio switches off Nagle's algorithm; without, small answers would
    # wait 40 ms for an acknowledgement.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        address = f"{settings.host}:{settings.port}"
        raise SettingsError(
            f"cannot listen on {address}: {error.strerror}; is another server running there?"
        ) from error
    return listening


def _url(settings: Settings, listening: socket.socket) -> str:
    scheme = "http" if settings.tls_key is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


def _allow_many_connections(wanted: int) -> None:
    """Raise the limit on open files as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = wanted + 256
    if soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(enough, hard), hard))


def _uvicorn_config(app: DeftApp, settings: Settings) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=build_http_protocol(app.service.bounds),
        ws=build_websocket_protocol(app.service.bounds),
        log_config=None,
        access_log=False,
        server_header=False,
        ws_max_size=settings.max_body_bytes,
        ws_per_message_deflate=False,  # pixels do not shrink, and inflating them takes time
        timeout_keep_alive=int(settings.keep_alive_s),
        timeout_graceful_shutdown=LAST_WORDS_S,
        limit_concurrency=settings.max_connections,
        h11_max_incomplete_event_size=settings.max_header_bytes,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=None if settings.tls_client_ca is None else str(settings.tls_client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if settings.tls_client_ca is None else ssl.CERT_REQUIRED,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"cannot use the TLS files: {error}") from error
    return config


class _Server(uvicorn.Server):
    """Stops at a signal, or when the policy is beyond help."""

    def __init__(self, config: uvicorn.Config, app: DeftApp, url: str) -> None:
        super().__init__(config)
        self.exit_code = ExitCode.STOPPED
        self._service = service = app.service
        self._url = url
        self._stopping: asyncio.Task[None] | None = None
        service.scheduler.on_fatal = self._give_up
        service.scheduler.on_ready = self._welcome

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Finish what is in hand on SIGTERM or SIGINT; a second signal ends at once."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def on_tick(self, counter: int) -> bool:
        """Do what is done ten times a second, and some of it every second."""
        if counter % TICKS_A_SECOND == 0:
            give_back_freed_memory()
        return await super().on_tick(counter)

    def _welcome(self) -> None:
        # What exists once the policy is warm lives as long as the process; the garbage collector
        # need not look at it again, and its longest pauses are gone.
        gc.freeze()
        policy = self._service.scheduler.policy
        if policy is None:
            return
        if sys.stderr.isatty():
            sys.stderr.write(welcome(policy.info, self._service.settings, self._url))
        elif self._service.settings.dashboard:
            logger.info("the dashboard is at %s/dashboard", self._url)

    def _stop(self) -> None:
        if self._stopping is not None:
            self.should_exit = self.force_exit = True
            return
        logger.info("stopping: %d requests in hand", self._service.num_in_hand)
        self._stopping = asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        if not await self._service.drain(self._service.settings.drain_s):
            logger.warning("%d requests were not finished", self._service.num_in_hand)
        self.should_exit = True

    def _give_up(self, phase: ServerPhase) -> None:
        hangs = phase is ServerPhase.STUCK
        self.exit_code = ExitCode.POLICY_HANGS if hangs else ExitCode.POLICY_BROKEN
        logger.error("giving up: %s", self._service.readiness.sentence)
        self.should_exit = True


def keep_freed_memory() -> bool:
    """Have the allocator keep freed memory: fresh pages for every frame cost more than its copies.

    Returns whether that worked (glibc only).
    """
    mallopt = _of_glibc("mallopt")
    wanted = {
        _M_ARENA_MAX: _NUM_ARENAS,
        _M_TRIM_THRESHOLD: _KEPT_BYTES,
        _M_MMAP_THRESHOLD: _LARGEST_KEPT_BYTES,
    }
    return mallopt is not None and all(mallopt(*one) == 1 for one in wanted.items())


def give_back_freed_memory() -> None:
    """Have the allocator give back what is free between what is in use, too (glibc only).

    On its own it gives back no more than its end, where a flood leaves small things behind.
    """
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(_KEPT_BYTES)


def _of_glibc(name: str) -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)  # musl has neither
