"""What a call to a server raises, beside the errors of bytes that cannot be used.

DeftError                           (`deft_core.errors`)
├── WireError                       the answer cannot be used, or what was given to send
├── TransportError                  no answer arrived
│   ├── ServerUnreachableError      the connection could not be made, or broke
│   │   └── WrongServerError        no host of that name, or a certificate that is not trusted
│   └── AnswerTimeoutError          connected, but the answer took too long
└── ProblemError                    the server answered with a problem document
    ├── RefusedRequestError         400, 408, 413, 415, 422: send something else
    ├── AccessDeniedError           401, 403
    ├── UnknownEndpointError        404, 405, 421
    ├── ConflictError               409
    ├── OverloadedError             429, with `retry_after_s`
    ├── NotReadyError               502, 503, with `retry_after_s`
    ├── DeadlineMissedError         504
    ├── NoActionError               500: the policy wrote a text and no action; `reasoning` has it
    └── ServerFaultError            500 and anything else; quote the request id to its operator
"""

from deft_core.errors import DeftError, Problem


class TransportError(DeftError):
    """No answer arrived."""


class ServerUnreachableError(TransportError):
    """The connection could not be made, or broke."""


class WrongServerError(ServerUnreachableError):
    """No host of that name, or a certificate that is not trusted: asking again changes nothing."""


class AnswerTimeoutError(TransportError):
    """Connected, but the answer took longer than the timeout."""


class ProblemError(DeftError):
    """The server answered with a problem document; the attributes are `Problem`'s."""

    def __init__(self, problem: Problem) -> None:
        culprit = f" (field {problem.field})" if problem.field else ""
        request = f" [request {problem.request_id}]" if problem.request_id else ""
        detail = problem.detail or problem.title
        super().__init__(f"{problem.status} {problem.title}: {detail}{culprit}{request}")
        self.problem = problem
        self.status = problem.status
        self.title = problem.title
        self.detail = problem.detail
        self.field = problem.field
        self.request_id = problem.request_id  # what to quote to the operator
        self.retry_after_s = problem.retry_after_s


class RefusedRequestError(ProblemError):
    """The request cannot be answered as it is: send something else."""


class AccessDeniedError(ProblemError):
    """No API key, or one that may not do this."""


class UnknownEndpointError(ProblemError):
    """Nothing lives at that address, or the server has another name; is the URL right?"""


class ConflictError(ProblemError):
    """The request contradicts what the server is doing."""


class OverloadedError(ProblemError):
    """The server has more to do than it can; try again later."""


class NotReadyError(ProblemError):
    """The server is starting, stopping or broken."""

    @property
    def is_loading(self) -> bool:
        """Will it be ready once its policy is loaded?"""
        return self.detail.startswith(LOADING)


class DeadlineMissedError(ProblemError):
    """The answer could not be had before the deadline of the request."""


class ServerFaultError(ProblemError):
    """The server failed; its log explains the request id."""


class NoActionError(ProblemError):
    """What the policy wrote holds no action: hold, and ask again with the next frame."""

    @property
    def reasoning(self) -> str:
        """What it wrote."""
        return self.problem.reasoning or ""


NO_ACTION = "urn:deft:problem:no_action"
LOADING = "the policy is loading"  # how such a problem's detail begins
_ERRORS: dict[type[ProblemError], tuple[int, ...]] = {
    RefusedRequestError: (400, 408, 413, 415, 422),
    AccessDeniedError: (401, 403),
    UnknownEndpointError: (404, 405, 421),
    ConflictError: (409,),
    OverloadedError: (429,),
    NotReadyError: (502, 503),
    DeadlineMissedError: (504,),
}


def problem_error(problem: Problem) -> ProblemError:
    """Return the exception that stands for a problem."""
    if problem.type == NO_ACTION:
        return NoActionError(problem)
    kinds = (kind for kind, statuses in _ERRORS.items() if problem.status in statuses)
    return next(kinds, ServerFaultError)(problem)
