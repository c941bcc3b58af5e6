"""A service without arguments."""

from dataclasses import dataclass


class Trigger:
    class Request:
        pass

    @dataclass
    class Response:
        success: bool = False
        message: str = ""
