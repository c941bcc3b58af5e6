"""Errors as application/problem+json, and their place in the log."""

import logging
import math

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from deft_client import errors
from deft_client.wire import json_codec as wire_json
from deft_server.errors import PolicyFailedError, Problem, problem_of
from deft_server.serving import request_ids

CONTENT_TYPE = "application/problem+json"

logger = logging.getLogger(__name__)


def describe(error: Exception, connection: HTTPConnection | None = None) -> Problem:
    """Look an error up, and log it if it is the server's fault."""
    problem = problem_of(error)
    if problem.kind.status == 500:
        path = "" if connection is None else connection.url.path
        # The policy thread has logged the traceback of its own failures already.
        traceback = None if isinstance(error, PolicyFailedError) else error
        logger.error(
            "%s on %s, request %s: %s (%r)",
            problem.kind.name,
            path,
            request_ids.current.get(),
            error,
            error.__cause__,
            exc_info=traceback,
        )
    return problem


def problem_body(problem: Problem) -> bytes:
    """Return a problem as JSON."""
    return wire_json.encode_problem(
        errors.Problem(
            status=problem.kind.status,
            title=problem.kind.title,
            detail=problem.detail,
            type=f"urn:deft:problem:{problem.kind.name}",
            field=problem.field,
            request_id=request_ids.current.get() or None,
            retry_after_s=problem.retry_after_s,
        )
    )


def problem_response(problem: Problem) -> Response:
    """Return a problem as an HTTP response."""
    headers = dict(problem.headers)
    if problem.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(problem.retry_after_s)))
    if problem.kind.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(problem_body(problem), problem.kind.status, headers, CONTENT_TYPE)


async def answer_problem(request: Request, error: Exception) -> Response:
    """Turn an exception into a response: the app's one exception handler."""
    return problem_response(describe(error, request))
