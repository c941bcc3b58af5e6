"""What the server overrides or reads of libraries although they do not document it.

uvicorn's protocol classes have no public hooks for bounds, so `http/connections.py` derives from
them. A release that renames one of these methods, or calls it with other arguments, would drop a
bound without a word. These tests name the hook; `test_bounds.py` shows what each bound does.
"""

import ast
import asyncio
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httptools
import pytest
import uvicorn
from uvicorn.protocols.http import h11_impl, httptools_impl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame
from websockets.protocol import CONNECTING
from websockets.server import ServerProtocol

from deft_server.commands import serve
from deft_server.http import connections

CONNECTION = ("connection_made", "connection_lost", "data_received")
# Methods that ours override, and methods and attributes of an instance that ours use.
OVERRIDDEN: dict[type, dict[type, tuple[str, ...]]] = {
    H11Protocol: {connections._CountedConnection: CONNECTION},
    HttpToolsProtocol: {
        connections._CountedConnection: CONNECTION,
        connections._BoundedHeaders: (
            *("data_received", "on_message_begin", "on_url", "on_header", "on_headers_complete"),
            *("on_message_complete", "on_body", "send_400_response"),
        ),
    },
    WebSocketsSansIOProtocol: {
        connections._BoundedWebSocket: (
            *("connection_made", "connection_lost", "data_received", "run_asgi", "receive"),
            *("keepalive_timeout", "send_receive_event_to_app", "pause_writing"),
            *("resume_writing", "handle_cont", "handle_ping", "handle_pong"),
        ),
    },
    uvicorn.Server: {serve._Server: ("capture_signals", "on_tick")},
}
USED: dict[type, tuple[str, ...]] = {
    H11Protocol: ("loop", "transport", "cycle"),
    HttpToolsProtocol: (
        *("loop", "transport", "cycle", "parser", "pipeline", "url", "headers"),
        *("_should_upgrade", "send_400_response"),
    ),
    WebSocketsSansIOProtocol: (
        *("loop", "transport", "scope", "conn", "queue", "frames", "curr_msg_data_type"),
        *("read_paused", "writable", "disconnected", "close_sent", "ping_interval"),
        *("stop_keepalive", "handle_parser_exception"),
    ),
    uvicorn.Server: ("should_exit", "force_exit", "run"),
    httptools.HttpRequestParser: (
        *("feed_data", "should_upgrade", "get_method", "get_http_version"),
    ),
    ServerProtocol: ("reader", "handshake_exc", "state", "fail", "data_to_send"),
}
OURS = {one: theirs for theirs, by_class in OVERRIDDEN.items() for one in by_class}


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """Answers nothing."""


def instance_of(theirs: type) -> Any:
    """An object of a library's class, as far as it is when the first bytes arrive."""
    config = uvicorn.Config(_app, lifespan="off", log_config=None)
    config.load()
    if theirs is uvicorn.Server:
        return theirs(config)
    if theirs is httptools.HttpRequestParser:
        return theirs(object())
    if theirs is ServerProtocol:
        return theirs()
    protocol = theirs(config, ServerState(), {}, asyncio.new_event_loop())
    if issubclass(theirs, HttpToolsProtocol):
        protocol.on_message_begin()  # makes the attributes of a request
    if issubclass(theirs, WebSocketsSansIOProtocol):
        protocol.scope = {}  # made of the handshake; its extensions are ASGI's
    protocol.loop.close()
    return protocol


def shape_of(method: Callable[..., Any]) -> tuple[list[Any], bool]:
    """How a method is called: the kinds of its arguments, and whether it is awaited."""
    kinds = [one.kind for one in inspect.signature(method).parameters.values()]
    return kinds, inspect.iscoroutinefunction(method)


def broken_overrides(ours: type, theirs: type, names: tuple[str, ...]) -> list[str]:
    """The hooks of a library's class that are gone, or are called in another way than ours."""
    broken = []
    for name in names:
        base = vars(theirs).get(name)
        if base is None:
            broken.append(f"{theirs.__name__}.{name} is gone; {ours.__name__} overrides it")
        elif shape_of(base) != shape_of(vars(ours)[name]):
            signature = inspect.signature(base)
            broken.append(f"{theirs.__name__}.{name}{signature}; {ours.__name__} differs")
    return broken


@pytest.mark.parametrize("ours", OURS, ids=lambda one: one.__name__)
def test_every_method_that_is_overridden_is_there_with_the_same_arguments(ours: type):
    for theirs, by_class in OVERRIDDEN.items():
        assert broken_overrides(ours, theirs, by_class.get(ours, ())) == []


@pytest.mark.parametrize("theirs", USED, ids=lambda one: one.__name__)
def test_every_attribute_that_is_used_is_there(theirs: type):
    found = instance_of(theirs)
    gone = [f"{theirs.__name__}.{name}" for name in USED[theirs] if not hasattr(found, name)]
    assert gone == []


def test_the_parts_of_the_libraries_that_attributes_lead_to_are_there():
    websocket = ServerProtocol()
    assert len(websocket.reader.buffer) == 0
    assert websocket.state is CONNECTING
    assert {"data", "fin"} <= set(inspect.signature(Frame).parameters)
    assert issubclass(httptools.HttpParserUpgrade, Exception)
    for module in (h11_impl, httptools_impl):  # of the attribute `cycle`
        assert "response_complete" in module.RequestResponseCycle.__init__.__code__.co_names


OVERRIDE_CASES = [
    (ours, theirs, name)
    for theirs, by_class in OVERRIDDEN.items()
    for ours, names in by_class.items()
    for name in names
]


@pytest.mark.parametrize(
    ("ours", "theirs", "name"),
    OVERRIDE_CASES,
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_a_hook_that_a_release_drops_or_changes_is_named(ours: type, theirs: type, name: str):
    """The check itself: on a copy of the library's class without the method, or with another."""
    names = OVERRIDDEN[theirs][ours]

    def changed(self: Any, one: Any, two: Any, three: Any) -> None:
        """Takes what no hook takes."""

    rest = {key: value for key, value in vars(theirs).items() if key not in (name, "__dict__")}
    rest.pop("__weakref__", None)
    without = type(theirs.__name__, theirs.__bases__, rest)
    other = type(theirs.__name__, theirs.__bases__, {**rest, name: changed})

    assert [one.split()[0] for one in broken_overrides(ours, without, names)] == [
        f"{theirs.__name__}.{name}"
    ]
    (fault,) = broken_overrides(ours, other, names)
    assert fault.startswith(f"{theirs.__name__}.{name}(self: Any, one: Any")


def test_the_lists_above_name_all_that_the_classes_override_or_use():
    """By the source: `super().NAME`, and `self.NAME` where no class of ours defines it."""
    for module in (connections, serve):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        for node in tree.body:
            if not isinstance(node, ast.ClassDef) or vars(module)[node.name] not in OURS:
                continue
            ours = vars(module)[node.name]
            theirs = OURS[ours]
            called, used = names_in(node)
            own = set(vars(ours)) | assigned_in(node)
            assert called - {"__init__"} <= set(OVERRIDDEN[theirs][ours]), ours
            assert used - own - {"bounds", "exit_code"} <= set(USED[theirs]) | set(
                OVERRIDDEN[theirs][ours]
            )


def names_in(node: ast.ClassDef) -> tuple[set[str], set[str]]:
    """The names behind `super().` and those behind `self.` in a class."""
    text = ast.unparse(node)
    return set(re.findall(r"super\(\)\.(\w+)", text)), set(re.findall(r"\bself\.(\w+)", text))


def assigned_in(node: ast.ClassDef) -> set[str]:
    """The private attributes that a class makes itself; `bounds` and `exit_code` are public."""
    return set(re.findall(r"\bself\.(_\w+)(?::[^=\n]+)? = ", ast.unparse(node)))
