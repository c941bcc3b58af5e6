"""Errors as application/problem+json, and their place in the log."""

import logging
import math
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from deft_client.errors import Problem
from deft_client.wire.json_codec import encode_problem
from deft_server.errors import UNEXPECTED, PolicyFailedError, kind_of
from deft_server.serving.access import current_request_id

CONTENT_TYPE = "application/problem+json"

logger = logging.getLogger(__name__)


def describe(error: Exception, connection: HTTPConnection | None = None) -> Problem:
    """Return what a caller is told of an error, and log it if it is the server's fault.

    An error that nobody foresaw keeps its text to itself.
    """
    kind = kind_of(error)
    if kind.status == 500:
        path = "" if connection is None else connection.url.path
        # The policy thread has logged the traceback of its own failures already.
        traceback = None if isinstance(error, PolicyFailedError) else error
        logger.error(
            "%s on %s, request %s: %s (%r)",
            kind.name,
            path,
            current_request_id.get(),
            error,
            error.__cause__,
            exc_info=traceback,
        )
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    if kind is UNEXPECTED:
        detail = "The server failed; quote the request id to its operator."
    return Problem(
        status=kind.status,
        title=kind.title,
        detail=detail,
        type=f"urn:deft:problem:{kind.name}",
        field=None if kind is UNEXPECTED else getattr(error, "field", None),
        request_id=current_request_id.get() or None,
        retry_after_s=None if kind is UNEXPECTED else getattr(error, "retry_after_s", None),
    )


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """Return a problem as an HTTP response."""
    headers = dict(headers or {})
    if problem.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(problem.retry_after_s)))
    if problem.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(encode_problem(problem), problem.status, headers, CONTENT_TYPE)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Turn what the framework raises (no such route, wrong method) into a response."""
    assert isinstance(error, HTTPException)
    return problem_response(describe(error, request), error.headers)
