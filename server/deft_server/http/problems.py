"""Errors as application/problem+json, and their place in the log."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from deft_core.errors import Problem
from deft_core.wire.codec import encode_problem
from deft_policies.errors import NoActionError
from deft_server.errors import UNEXPECTED, PolicyFailedError, kind_of
from deft_server.serving.access import current_request_id

CONTENT_TYPE = "application/problem+json"
_MAX_REASONING = 8192  # characters: clients read problems of at most 64 KiB

logger = logging.getLogger(__name__)


def describe(error: Exception, connection: HTTPConnection | None = None) -> Problem:
    """Return an error as its caller gets it, and log it if it is the server's fault.

    An error that nobody foresaw keeps its text to itself.
    """
    kind = kind_of(error)
    if kind.status == 500:
        path = "" if connection is None else connection.url.path
        # The policy thread has logged the traceback of its own failures already.
        traceback = None if isinstance(error, PolicyFailedError | NoActionError) else error
        cause = "" if error.__cause__ is None else f" ({error.__cause__!r})"
        logger.error(
            "%s on %s, request %s: %s%s",
            kind.name,
            path,
            current_request_id.get(),
            error,
            cause,
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
        reasoning=error.reasoning[:_MAX_REASONING] if isinstance(error, NoActionError) else None,
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
    problem = describe(error, request)
    path, headers = request.url.path, error.headers or {}
    if error.status_code == 404:
        problem = replace(problem, detail=f"nothing is at {path[:_SHOWN]!r}; {_advice(request)}")
    elif error.status_code == 405 and "Allow" in headers:
        detail = f"{path[:_SHOWN]} takes {headers['Allow']}, not {request.method[:_SHOWN]}"
        problem = replace(problem, detail=detail)
    return problem_response(problem, headers)


_SHOWN = 80  # characters of what a caller sent


def _advice(request: Request) -> str:
    """Return the path that was probably meant, or where frames go."""
    known = {getattr(one, "path", "") for one in request.app.router.routes}
    found = get_close_matches(request.url.path[:_SHOWN].rstrip("/"), known - {"/"}, n=1)
    if found:
        return f"did you mean {found[0]}?"
    return "frames go to POST /v1/act, those of OpenVLA's clients to POST /act; see /docs"
