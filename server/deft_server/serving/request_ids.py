"""A name for every request, on the answer and in every log line about it."""

import os
import re
from contextvars import ContextVar

HEADER = b"x-request-id"
_ACCEPTABLE = re.compile(rb"[A-Za-z0-9._:-]{1,64}")

current: ContextVar[str] = ContextVar("deft_request_id", default="")


def new() -> str:
    """Return a fresh id."""
    return os.urandom(8).hex()


def given_or_new(value: bytes | None) -> str:
    """Return the caller's id if it is harmless to repeat, else a fresh one."""
    if value is not None and _ACCEPTABLE.fullmatch(value):
        return value.decode("ascii")
    return new()
