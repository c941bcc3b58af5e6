"""The process of a policy: load it, warm it, answer batches until the server hangs up.

Started by `process`; knows nothing of sessions, deadlines or HTTP.
"""

import ctypes
import logging
import signal
import socket
import sys
from collections.abc import Sequence

from deft_policies.base import ActRequest, LimitedPolicy, Policy
from deft_policies.errors import PolicyError, RequestError
from deft_server.commands.logs import start_logging
from deft_server.hosting.allocator import keep_freed_memory
from deft_server.hosting.attempts import Answer, Attempts, answer_batch
from deft_server.hosting.frame_block import FrameBlock
from deft_server.hosting.host import PolicyRecipe, load_and_warm
from deft_server.hosting.messages import (
    Message,
    PolicyFacts,
    encode_message,
    framed,
    read_batch,
    take_message,
)
from deft_server.settings import LogFormat, LogLevel, Settings, SettingsError

_RECEIVED_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Serve one server: descriptors of socket and block, log level and format, then the recipe."""
    channel = socket.socket(fileno=int(arguments[0]))
    block = FrameBlock(int(arguments[1]))
    log = start_logging(
        Settings(log_level=LogLevel(arguments[2]), log_format=LogFormat(arguments[3]))
    )
    # The server decides when this ends, also where the terminal tells both to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    keep_freed_memory()
    try:
        policy = load_and_warm(PolicyRecipe(arguments[4], tuple(arguments[5:])))
    except (PolicyError, SettingsError) as error:
        _send(channel, PolicyError(str(error)))
        return 1
    except (Exception, SystemExit) as error:
        logger.exception("the policy could not be loaded")
        _send(channel, PolicyError(f"{type(error).__name__}: {error}"))
        return 1
    _send(channel, facts_of(policy))
    serve(policy, channel, block)
    log.stop()
    return 0


def serve(policy: Policy, channel: socket.socket, block: FrameBlock) -> None:
    """Answer batches until the server hangs up."""
    received = bytearray()
    while True:
        body = take_message(received)
        if body is not None:
            _send(channel, answer(policy, read_batch(body, block)))
        elif data := channel.recv(_RECEIVED_BYTES):
            received += data
        else:
            return


def answer(policy: Policy, batch: Sequence[ActRequest]) -> Attempts:
    """Answer a batch, but for the frames that the policy says beforehand it cannot answer."""
    answers: list[Answer | None] = [_refusal(policy, request) for request in batch]
    good = [index for index, refused in enumerate(answers) if refused is None]
    attempts = Attempts([], [], 0.0)
    if good:
        attempts = answer_batch(policy, [batch[index] for index in good])
        for index, one in zip(good, attempts.answers, strict=True):
            answers[index] = one
    found = [one for one in answers if one is not None]
    return Attempts(found, attempts.failures, attempts.service_s)


def facts_of(policy: Policy) -> PolicyFacts:
    """What the server has to know."""
    info = policy.info
    if not isinstance(policy, LimitedPolicy):
        return PolicyFacts(info)
    return PolicyFacts(info, {key: policy.action_limits(key) for key in info.statistics_keys})


def die_with_parent() -> None:
    """Have the system end this process with the server's, even while the policy hangs."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _refusal(policy: Policy, request: ActRequest) -> RequestError | None:
    try:
        policy.check(request.observation, request.options)
    except RequestError as error:
        return error
    return None


def _send(channel: socket.socket, message: Message) -> None:
    channel.sendall(framed(encode_message(message)))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
