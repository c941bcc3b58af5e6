"""A route for what is on the way of every frame."""

from starlette.routing import Match, Route
from starlette.types import Scope


class PlainRoute(Route):
    """A route that is not FastAPI's, which looks for dependencies on every request.

    It leaves its name in the scope as FastAPI's routes do, for the metrics. What the OpenAPI
    document says about it is in `openapi`.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Tell whether a request is for this route."""
        match, found = super().matches(scope)
        if match is not Match.NONE:
            found["route"] = self
        return match, found
