"""The captured frames of tests/golden/wire, by name."""

import json
from dataclasses import dataclass
from pathlib import Path

WIRE = Path(__file__).parents[2] / "golden" / "wire"


@dataclass(frozen=True)
class ActCapture:
    """One `POST /act` (or GET) and what OpenVLA's own server replied."""

    name: str
    method: str
    content_type: str | None
    request: bytes
    status: int
    response: bytes


def act_captures() -> list[ActCapture]:
    return [
        ActCapture(
            name=row["name"],
            method=row["method"],
            content_type=row["request_content_type"],
            request=frame(row["request"]),
            status=row["status"],
            response=frame(row["response"]),
        )
        for row in json.loads((WIRE / "index.json").read_text())["openvla_act"]
    ]


def act_capture(name: str) -> ActCapture:
    return next(one for one in act_captures() if one.name == name)


def frame(name: str) -> bytes:
    return (WIRE / name).read_bytes()


def frames(prefix: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(WIRE.glob(f"{prefix}*.bin"))}
