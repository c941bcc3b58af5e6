"""Asks a server over a socket and writes down what comes back, without what is random or timed."""

import base64
import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from io import BytesIO
from typing import Any

import msgpack
import numpy as np
from PIL import Image
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.black_box.product import Server

MASK = "*"
TIMEOUT_S = 30.0
JSON = "application/json"
MSGPACK = "application/msgpack"
_UNTOLD_HEADERS = {"date", "server", "content-length", "connection"}
# Keys whose values differ from run to run, or are sentences for people.
_MASKED = {"detail", "title", "request_id", "versions", "timestamp", "message", "harness_version"}
_MASKED_IN_TEXT = re.compile(
    r'("(?:detail|title|message|harness_version|request_id)": ?)"(?!mine)(?:[^"\\]|\\.)*"'
    r'|("(?:weights|processor)": ?)"[^"]*"'
    r'|("versions": ?)\{[^}]*\}'
    r'|("\w+_m?s": ?)[\d.e+-]+'
)
Headers = Mapping[str, str]


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes | str = b""
    headers: Headers = field(default_factory=dict)


def post(path: str, body: object, content_type: str = JSON, **headers: str) -> Request:
    """`body` is packed as the content type says, unless it is bytes already."""
    if not isinstance(body, bytes):
        body = msgpack.packb(body) if content_type == MSGPACK else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Request("POST", path, body, {"content-type": content_type, **named})


def form(path: str, *parts: tuple[str, str | bytes]) -> Request:
    """Text fields, and files where the value is bytes."""
    lines = []
    for name, value in parts:
        file = '; filename="x"' if isinstance(value, bytes) else ""
        head = f'--line\r\ncontent-disposition: form-data; name="{name}"{file}\r\n\r\n'.encode()
        lines.append(head + (value if isinstance(value, bytes) else value.encode()) + b"\r\n")
    return post(path, b"".join([*lines, b"--line--\r\n"]), "multipart/form-data; boundary=line")


def ask(server: Server, request: Request) -> dict[str, Any]:
    """Status, headers and body as they are kept."""
    response, content = fetch(server, request)
    headers = {name.lower(): value for name, value in response.getheaders()}
    told = {
        name: _masked_header(name, value)
        for name, value in sorted(headers.items())
        if name not in _UNTOLD_HEADERS
    }
    return {
        "status": response.status,
        "headers": told,
        "body": readable(content, headers.get("content-type", ""), response.status),
    }


def fetch(server: Server, request: Request) -> tuple[HTTPResponse, bytes]:
    """Send one request on a connection of its own."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request(request.method, request.path, request.body or None, {**request.headers})
        response = connection.getresponse()
        return response, response.read()


def answers(server: Server, requests: Mapping[str, Request]) -> dict[str, Any]:
    return {name: ask(server, request) for name, request in requests.items()}


def _masked_header(name: str, value: str) -> str:
    if name == "retry-after":
        return MASK
    if name == "x-request-id":
        return value if value.startswith("mine") else MASK
    if name == "x-deft-reason":  # a status, and then a sentence
        return f"{value[:3]} {MASK}"
    return value


def readable(content: bytes, content_type: str, status: int) -> Any:
    """Text as it came, msgpack as JSON, anything else by its digest."""
    kind = content_type.partition(";")[0]
    if not content:
        return ""
    if kind.endswith("json"):
        return masked_text(content.decode())
    if kind == MSGPACK:
        return masked(msgpack.unpackb(content, strict_map_key=False))
    if kind.startswith("text/plain"):
        return content.decode() if status < 400 else MASK
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def masked_text(text: str) -> str:
    """JSON to the byte, but for what is timed, random or a sentence."""
    return _MASKED_IN_TEXT.sub(lambda found: next(filter(None, found.groups())) + f'"{MASK}"', text)


def masked(value: Any, name: object = "") -> Any:
    """Nested values as JSON has them; arrays as dtype, shape and numbers."""
    name = name.decode() if isinstance(name, bytes) else name
    if name in _MASKED or str(name).endswith("_ms") and isinstance(value, float):
        return MASK
    if name == "session_id" and isinstance(value, str) and value.startswith("socket-"):
        return f"socket-{MASK}"
    if name in ("weights", "processor"):  # a path, and this machine's
        return MASK
    if isinstance(value, Mapping):
        array = _array(value)
        if array is not None:
            return {"keys": [_text(key) for key in value], **shown(array)}
        return {_text(key): masked(one, key) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [masked(one) for one in value]
    if isinstance(value, bytes) and value[:4] == b"\x89PNG":
        with Image.open(BytesIO(value)) as picture:
            return {"png": shown(np.asarray(picture))}
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return value


def shown(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """An array as JSON; pictures and other large ones by their digest."""
    told: dict[str, Any] = {"dtype": array.dtype.name, "shape": list(array.shape)}
    if array.size > 200:
        return {**told, "sha256": hashlib.sha256(array.tobytes()).hexdigest()}
    return {**told, "values": array.tolist()}


def _text(key: object) -> str:
    return f"b:{key.decode()}" if isinstance(key, bytes) else str(key)


def _array(value: Mapping[Any, Any]) -> np.ndarray[Any, Any] | None:
    """What is packed as an array: our own way, msgpack-numpy's, json-numpy's, npy files'."""
    for data, dtype, shape in (
        ("data", "dtype", "shape"),
        (b"data", b"dtype", b"shape"),
        ("__numpy__", "dtype", "shape"),
    ):
        if data in value and dtype in value and shape in value:
            content, kind = value[data], value[dtype]
            content = base64.b64decode(content) if isinstance(content, str) else content
            kind = kind.decode() if isinstance(kind, bytes) else kind
            if not isinstance(content, bytes) or not isinstance(kind, str):
                return None  # a description of arrays, as in the OpenAPI document
            return np.frombuffer(content, np.dtype(kind)).reshape(value[shape])
    return None


def brief_trace(trace: Mapping[str, Any]) -> dict[str, Any]:
    """A decode trace: a line for each pass, with what was drafted, from which source, and kept."""
    plain = ("method", "rule", "plan", "guard", "tokens", "predicted")
    return {
        "fields": ", ".join(trace),
        "fields of a pass": ", ".join(trace["passes"][0]),
        **{name: trace[name] for name in plain if name in trace},
        "passes": [
            f"{'prefill' if one['is_prefill'] else 'pass'} from {one['tokens'][0]}: drafted "
            f"{dict(sorted(Counter(one['sources'][1:]).items()))}, kept {one['path']}, "
            f"then {one['bonus']}"
            for one in trace["passes"]
        ],
    }


def packed_array(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """As msgpack requests of ours carry it."""
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


def json_numpy(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """As OpenVLA's clients send it."""
    content = base64.b64encode(array.tobytes()).decode()
    return {"__numpy__": content, "dtype": array.dtype.str, "shape": list(array.shape)}


def msgpack_numpy(array: np.ndarray[Any, Any]) -> dict[bytes, Any]:
    """As openpi's clients send it."""
    return {
        b"__ndarray__": True,
        b"data": array.tobytes(),
        b"dtype": array.dtype.str,
        b"shape": list(array.shape),
    }


@contextmanager
def socket_to(server: Server, path: str, **headers: str) -> Iterator[ClientConnection]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"ws://{server.address}{path}"
    with connect(url, additional_headers=named, open_timeout=TIMEOUT_S, max_size=None) as socket:
        yield socket


def talk(
    server: Server,
    path: str,
    frames: Iterable[tuple[str, bytes | str]],
    speaks_first: bool = False,
    has_answer: Callable[[str], bool] = lambda _: True,
    **headers: str,
) -> dict[str, Any]:
    """Send frames one after another; what comes back to each, or how the connection ended."""
    told: dict[str, Any] = {}
    try:
        with socket_to(server, path, **headers) as socket:
            try:
                if speaks_first:
                    told["first frame"] = received(socket)
                for name, frame in frames:
                    told[name] = "nothing came"
                    socket.send(frame)
                    if has_answer(name):
                        told[name] = received(socket)
            except ConnectionClosed as closed:
                told["closed"] = closed.rcvd.code if closed.rcvd else None
    except InvalidStatus as refused:
        told["refused"] = refused.response.status_code
    return told


def received(socket: ClientConnection) -> dict[str, Any]:
    message = socket.recv(TIMEOUT_S)
    if isinstance(message, bytes):
        return {"binary": masked(msgpack.unpackb(message, strict_map_key=False))}
    try:
        json.loads(message)
    except json.JSONDecodeError:
        return {"text": MASK}  # a sentence for people
    return {"text": masked_text(message)}


def series(page: str) -> list[str]:
    """The names and labels of our metrics, without their values."""
    lines = [line for line in page.splitlines() if line.startswith("deft_")]
    names = {re.sub(r'le="[^"]*"', f'le="{MASK}"', line.rpartition(" ")[0]) for line in lines}
    return sorted(one for one in names if "_created" not in one)
