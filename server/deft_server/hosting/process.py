"""A policy in a process of its own: it may hold the interpreter, crash or be killed.

Frames cross in shared memory; everything else through a socket that the event loop watches, so no
thread stands between. What is at the other end is `worker`.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from deft_client.errors import WireError
from deft_client.types import ActOptions, Observation
from deft_policies.base import ActionLimits, ActRequest
from deft_policies.model.statistics import find_statistics_key
from deft_server.hosting.attempts import Attempts
from deft_server.hosting.frame_block import FrameBlock
from deft_server.hosting.host import HostedPolicy, Listener, PolicyRecipe
from deft_server.hosting.messages import (
    PolicyFacts,
    decode_message,
    framed,
    take_message,
    write_batch,
)
from deft_server.settings import Settings

_RECEIVED_BYTES = 1024 * 1024
_LAST_WORDS_S = 2.0  # for a process that has hung up to end by itself


class PolicyProcess:
    """Owns the process, from `start` to `stop` or until it is lost."""

    is_disposable = True
    watches_itself = False

    def __init__(self, recipe: PolicyRecipe, settings: Settings, listener: Listener) -> None:
        self._recipe = recipe
        self._settings = settings
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._number = 0  # of the batch in hand: there is one at a time
        self._is_over = False  # nothing is to be told any more
        self._is_gone = False  # the process has hung up, or was hung up on
        self._block: FrameBlock
        self._channel: socket.socket
        self._process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start the process; it loads the policy."""
        self._block = FrameBlock.create()
        self._channel, theirs = socket.socketpair()
        descriptors = (theirs.fileno(), self._block.descriptor)
        with theirs:
            self._process = subprocess.Popen(
                self._command(descriptors),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._channel.setblocking(False)
        self._loop.add_reader(self._channel, self._receive)

    def submit(self, number: int, batch: Sequence[ActRequest]) -> None:
        """Hand a batch over. Where the process is gone, that will be told soon."""
        if self._is_gone:
            return
        self._number = number
        message = framed(write_batch(batch, self._block))
        try:
            self._channel.sendall(message)
        except OSError:  # broken, or full: nobody reads; a batch of one at a time always fits
            self._process.kill()

    def stop(self, timeout_s: float) -> bool:
        """Hang up, and kill a process that does not end in time."""
        self._is_over = True
        with suppress(OSError):  # it may be gone already
            self._channel.shutdown(socket.SHUT_WR)
        self._end(timeout_s)
        self._loop.call_soon_threadsafe(self._clear_away)
        return True

    def _command(self, descriptors: tuple[int, int]) -> list[str]:
        level, form = self._settings.log_level.value, self._settings.log_format.value
        own = [*map(str, descriptors), level, form]
        module = "deft_server.hosting.worker"
        return [sys.executable, "-m", module, *own, self._recipe.function, *self._recipe.arguments]

    def _receive(self) -> None:
        try:
            data = self._channel.recv(_RECEIVED_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        self._received += data
        try:
            while (body := take_message(self._received)) is not None:
                self._tell(body)
        except WireError:
            self._process.kill()
            self._lose()

    def _tell(self, body: bytes) -> None:
        if self._is_over:
            return
        message = decode_message(body)
        if isinstance(message, PolicyFacts):
            self._listener.policy_loaded(self, hosted(message))
        elif isinstance(message, Attempts):
            self._listener.batch_finished(self, self._number, message)
        else:
            self._is_over = True
            self._listener.policy_broken(self, message)

    def _clear_away(self) -> None:
        if not self._is_gone:
            self._is_gone = True
            self._loop.remove_reader(self._channel)
            self._channel.close()
            self._block.close()

    def _lose(self) -> None:
        """Tell of the loss once the process has let go of all that it held."""
        self._clear_away()
        if self._is_over:
            return
        ended = self._loop.run_in_executor(None, self._end, _LAST_WORDS_S)
        ended.add_done_callback(lambda _: self._tell_of_loss())

    def _tell_of_loss(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._listener.policy_lost(self, f"its process {describe_end(self._process)}")

    def _end(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def hosted(facts: PolicyFacts) -> HostedPolicy:
    """A policy that is known by its facts alone; the process checks the rest of every frame."""
    known, default = facts.info.statistics_keys, facts.info.default_statistics_key

    def key_of(statistics_key: str | None) -> str:
        return find_statistics_key(known, default if statistics_key is None else statistics_key)

    def check(_: Observation, options: ActOptions) -> None:
        key_of(options.statistics_key)

    def limits(statistics_key: str | None) -> ActionLimits:
        return facts.limits[key_of(statistics_key)]

    return HostedPolicy(facts.info, check, limits if facts.limits else None)


def describe_end(process: "subprocess.Popen[bytes]") -> str:
    """Say how a process ended."""
    code = process.returncode
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
