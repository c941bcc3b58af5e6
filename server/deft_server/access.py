"""Who is calling."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """Who sends a request: the name of an API key, or `anonymous` where none are asked for."""

    name: str = "anonymous"
    is_admin: bool = False


ANONYMOUS = Caller()
