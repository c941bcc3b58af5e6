"""What servers answer, protocol by protocol. Each function returns one recording."""

import base64
import hashlib
import json
import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from PIL import Image

from tests.black_box.exchanges import (
    JSON,
    MSGPACK,
    Request,
    answers,
    ask,
    brief_trace,
    fetch,
    form,
    json_numpy,
    msgpack_numpy,
    packed_array,
    post,
    series,
    talk,
)
from tests.black_box.product import FILES, GOLDEN, TINY_FLAGS, Server, serving

WIRE = GOLDEN / "wire"
IMAGES = GOLDEN / "images"
Answers = dict[str, Any]
PICTURE = (np.arange(6 * 8 * 3) % 251).astype(np.uint8).reshape(6, 8, 3)
WIDE = np.zeros((1, 5000, 3), np.uint8)
STATE = np.linspace(-1, 1, 8, dtype=np.float32)
INSTRUCTION = "lift the cup"


def encoded(picture: np.ndarray[Any, Any], kind: str = "png") -> bytes:
    file = BytesIO()
    Image.fromarray(picture).save(file, kind)
    return file.getvalue()


PNG = encoded(PICTURE)
JPEG = encoded(PICTURE, "jpeg")
RAW = {"encoding": "raw", **packed_array(PICTURE)}
RAW64 = {**RAW, "data": base64.b64encode(PICTURE.tobytes()).decode()}
FRAME = {"v": 1, "image": RAW, "instruction": INSTRUCTION}
FRAME64 = {"v": 1, "image": RAW64, "instruction": INSTRUCTION}


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def act_in_msgpack(server: Server) -> Answers:
    bodies: dict[str, Any] = {
        "raw": FRAME,
        "png": {**FRAME, "image": {"encoding": "png", "data": PNG}},
        "jpeg": {**FRAME, "image": {"encoding": "jpeg", "data": JPEG}},
        "every field": {
            **FRAME,
            "cameras": {"wrist": RAW, "side": {"encoding": "png", "data": PNG}},
            "state": packed_array(STATE),
            "session_id": "arm-1",
            "deadline_ms": 20000.0,
            "statistics_key": "constant",
            "decoding": "constant",
            "trace": True,
        },
        "no version": without(FRAME, "v"),
        "version 2": {**FRAME, "v": 2},
        "no image": without(FRAME, "image"),
        "no instruction": without(FRAME, "instruction"),
        "unknown field": {**FRAME, "instructions": "x"},
        "not a map": [1, 2],
        "image of floats": {**FRAME, "image": {**RAW, "dtype": "float32"}},
        "image too short": {**FRAME, "image": {**RAW, "data": b"123"}},
        "image of four channels": {**FRAME, "image": {**RAW, "shape": [6, 6, 4]}},
        "image too wide": {**FRAME, "image": {"encoding": "raw", **packed_array(WIDE)}},
        "image of another encoding": {**FRAME, "image": {"encoding": "webp", "data": PNG}},
        "image that is no picture": {**FRAME, "image": {"encoding": "png", "data": b"nothing"}},
        "image that is text": {**FRAME, "image": "picture.png"},
        "nine further cameras": {**FRAME, "cameras": {f"c{n}": RAW for n in range(9)}},
        "state with NaN": {**FRAME, "state": packed_array(STATE * np.float32(np.nan))},
        "state of doubles": {**FRAME, "state": packed_array(STATE.astype(np.float64))},
        "state too long": {**FRAME, "state": packed_array(np.zeros(1025, np.float32))},
        "instruction is a number": {**FRAME, "instruction": 3},
        "instruction is empty": {**FRAME, "instruction": ""},
        "instruction too long": {**FRAME, "instruction": "x" * 4097},
        "session id too long": {**FRAME, "session_id": "x" * 129},
        "deadline below zero": {**FRAME, "deadline_ms": -1.0},
        "unknown statistics key": {**FRAME, "statistics_key": "nothing"},
        "unknown decoding": {**FRAME, "decoding": "nothing"},
        "radius of a policy without": {**FRAME, "radius": 3},
        "radius below zero": {**FRAME, "radius": -1},
        "trace is a number": {**FRAME, "trace": 1},
    }
    requests = {name: post("/v1/act", body, MSGPACK) for name, body in bodies.items()}
    requests["empty"] = post("/v1/act", b"", MSGPACK)
    requests["cut off"] = post("/v1/act", msgpack.packb(FRAME)[:-9], MSGPACK)
    requests["more behind it"] = post("/v1/act", msgpack.packb(FRAME) + b"x", MSGPACK)
    requests["answered in JSON"] = post("/v1/act", FRAME, MSGPACK, accept=JSON)
    requests["with an id"] = post("/v1/act", FRAME, MSGPACK, x_request_id="mine-1")
    return answers(server, requests)


def act_in_json(server: Server) -> Answers:
    bodies: dict[str, Any] = {
        "raw": FRAME64,
        "png": {**FRAME64, "image": {"encoding": "png", "data": base64.b64encode(PNG).decode()}},
        "every field": {
            **FRAME64,
            "cameras": {"wrist": RAW64},
            "state": STATE.tolist(),
            "session_id": "arm-2",
            "deadline_ms": 20000,
            "statistics_key": "constant",
            "decoding": "constant",
            "trace": True,
        },
        "no image": without(FRAME64, "image"),
        "unknown field": {**FRAME64, "sesion_id": "x"},
        "not a map": "frame",
        "no base64": {**FRAME64, "image": {**RAW64, "data": "%%%"}},
        "image too short": {**FRAME64, "image": {**RAW64, "data": "AAAA"}},
        "image is null": {**FRAME64, "image": None},
        "state of words": {**FRAME64, "state": ["a"]},
        "state with a huge number": {**FRAME64, "state": [1e300]},
        "unknown statistics key": {**FRAME64, "statistics_key": "nothing"},
        "unknown decoding": {**FRAME64, "decoding": "nothing"},
        "deadline is text": {**FRAME64, "deadline_ms": "soon"},
        "deadline that cannot be met": {**FRAME64, "deadline_ms": 0.0001},
    }
    requests = {name: post("/v1/act", body) for name, body in bodies.items()}
    requests["broken"] = post("/v1/act", b'{"image": ')
    requests["NaN"] = post("/v1/act", b'{"image": NaN}')
    requests["two of a name"] = post("/v1/act", b'{"v": 1, "v": 1}')
    requests["not UTF-8"] = post("/v1/act", b'{"image": "\xff"}')
    requests["nested deeply"] = post("/v1/act", b"[" * 5000)
    requests["with a charset"] = post("/v1/act", FRAME64, "application/json; charset=utf-8")
    requests["answered in msgpack"] = post("/v1/act", FRAME64, accept=MSGPACK)
    requests["another content type"] = post("/v1/act", b"x", "text/plain")
    requests["no content type"] = Request("POST", "/v1/act", b"{}")
    requests["GET"] = Request("GET", "/v1/act")
    return answers(server, requests)


def act_in_forms(server: Server) -> Answers:
    good = (("image", PNG), ("instruction", INSTRUCTION))
    options = (("session_id", "arm-3"), ("trace", "true"), ("deadline_ms", "20000"))
    return answers(
        server,
        {
            "png": form("/v1/act", *good),
            "jpeg": form("/v1/act", ("image", JPEG), good[1]),
            "every field": form(
                "/v1/act", *good, *options, ("camera.wrist", JPEG), ("state", "[0.5, 1, -2]")
            ),
            "no image": form("/v1/act", good[1]),
            "no instruction": form("/v1/act", good[0]),
            "unknown field": form("/v1/act", *good, ("speed", "1")),
            "field twice": form("/v1/act", *good, good[1]),
            "image as text": form("/v1/act", ("image", "abc"), good[1]),
            "file that is no picture": form("/v1/act", ("image", b"abc"), good[1]),
            "state that is no list": form("/v1/act", *good, ("state", "fast")),
            "trace is 1": form("/v1/act", *good, ("trace", "1")),
            "radius is text": form("/v1/act", *good, ("radius", "wide")),
            "answered in msgpack": Request(
                **{
                    **vars(form("/v1/act", *good)),
                    "headers": {**form("/v1/act", *good).headers, "accept": MSGPACK},
                }
            ),
            "no boundary": post("/v1/act", b"x", "multipart/form-data"),
            "cut off": post("/v1/act", b"--line\r\n", "multipart/form-data; boundary=line"),
        },
    )


def stream(server: Server) -> Answers:
    frames = {
        "frame": FRAME,
        "same session": {**FRAME, "session_id": "arm-4"},
        "same session again": {**FRAME, "session_id": "arm-4", "trace": True},
        "no image": without(FRAME, "image"),
        "unknown field": {**FRAME, "instructions": "x"},
        "unknown decoding": {**FRAME, "decoding": "nothing"},
        "instruction too long": {**FRAME, "instruction": "x" * 4097},
    }
    conversation: list[tuple[str, bytes | str]] = [
        (name, msgpack.packb(frame)) for name, frame in frames.items()
    ]
    conversation += [("nothing", b""), ("broken", b"\xc1"), ("still there", msgpack.packb(FRAME))]
    return {
        "conversation": talk(server, "/v1/stream", conversation),
        "a text frame": talk(
            server, "/v1/stream", [("text", "hello"), ("then", conversation[0][1])]
        ),
        "another page's origin": talk(server, "/v1/stream", [], origin="http://elsewhere.example"),
        "not a handshake": ask(server, Request("GET", "/v1/stream")),
    }


def other_addresses(server: Server) -> Answers:
    """Addresses without frames, and addresses that do not exist."""
    reset = "/v1/reset"
    recorded = answers(
        server,
        {
            "info": Request("GET", "/v1/info"),
            "healthz": Request("GET", "/healthz"),
            "health": Request("GET", "/health"),
            "readyz": Request("GET", "/readyz"),
            "config": Request("GET", "/config"),
            "config to be changed": Request("GET", "/config?max_batch_size=4&nonsense=1"),
            "act for a session": post("/v1/act", {**FRAME64, "session_id": "arm-5"}),
            "reset": post(reset, {"session_id": "arm-5"}),
            "reset again": post(reset, {"session_id": "arm-5"}),
            "reset in msgpack": post(reset, {"session_id": "arm-5"}, MSGPACK),
            "reset of nothing": post(reset, {}),
            "reset with more": post(reset, {"session_id": "arm-5", "all": True}),
            "reset by number": post(reset, {"session_id": 5}),
            "reset broken": post(reset, b"{"),
            "reset by GET": Request("GET", reset),
            "admin without keys": post("/v1/admin/reset_all", {}),
            "unknown path": Request("GET", "/v2/act"),
            "wrong method": Request("DELETE", "/v1/info"),
            "head": Request("HEAD", "/healthz"),
            "options": Request("OPTIONS", "/v1/act"),
            "called by another name": Request("GET", "/v1/info", headers={"host": "evil.example"}),
            "long address": Request("GET", "/" + "x" * 70_000),
            "long header": Request("GET", "/v1/info", headers={"x-long": "x" * 40_000}),
            "from another page": Request(
                "GET", "/v1/info", headers={"origin": "http://evil.example"}
            ),
            "no dashboard login": Request("GET", "/dashboard/nothing"),
        },
    )
    document = json.loads(fetch(server, Request("GET", "/openapi.json"))[1])
    recorded["openapi"] = {
        "paths": {path: sorted(methods) for path, methods in sorted(document["paths"].items())},
        "schemas": {
            name: sorted(schema.get("properties", {}))
            for name, schema in sorted(document.get("components", {}).get("schemas", {}).items())
        },
    }
    return recorded


def metrics(server: Server) -> list[str]:
    """Names and labels, after all of the above."""
    body = ask(server, Request("GET", "/metrics"))["body"]
    assert isinstance(body, str), body
    waited = 'deft_requests_total{route="/readyz",status="503"}'  # by a machine that was slow
    return [one for one in series(body) if one != waited]


PROBLEM = {"x_deft_errors": "problem"}


def openvla_act(server: Server) -> Answers:
    """OpenVLA's `POST /act`, and with it what its own server was asked when it was captured."""
    good = {"image": json_numpy(PICTURE), "instruction": INSTRUCTION}
    requests = {
        "plain": post("/act", good),
        "encoded": post("/act", {"encoded": json.dumps(good)}),
        "statistics key": post("/act", {**good, "unnorm_key": "constant"}),
        "unknown statistics key": post("/act", {**good, "unnorm_key": "nothing"}),
        "same as a problem": post("/act", {**good, "unnorm_key": "nothing"}, **PROBLEM),
        "session": post("/act", good, x_deft_session="arm-6"),
        "session id too long": post("/act", good, x_deft_session="x" * 200),
        "grey": post("/act", {**good, "image": json_numpy(PICTURE[:, :, 0])}),
        "transparent": post("/act", {**good, "image": json_numpy(PICTURE.reshape(6, 6, 4))}),
    }
    recorded = answers(server, requests)
    for row in json.loads((WIRE / "index.json").read_text())["openvla_act"]:
        kind = row["request_content_type"]
        headers = {"content-type": kind} if kind else {}
        body = (WIRE / row["request"]).read_bytes()
        recorded[f"captured {row['name']}"] = ask(
            server, Request(row["method"], "/act", body, headers)
        )
        if row["method"] == "POST":
            recorded[f"captured {row['name']} as a problem"] = ask(
                server, Request("POST", "/act", body, {**headers, "x-deft-errors": "problem"})
            )
    return recorded


OBSERVATION = {
    "observation/image": msgpack_numpy(PICTURE),
    "observation/wrist_image": msgpack_numpy(PICTURE),
    "observation/state": msgpack_numpy(STATE),
    "prompt": INSTRUCTION,
}


def openpi(server: Server) -> Answers:
    floats = (np.ones((3, 6, 8), np.float32) * 0.5, np.ones((3, 6, 8), np.float32) * 2)
    droid = {
        "observation/exterior_image_1_left": msgpack_numpy(PICTURE),
        "observation/wrist_image_left": msgpack_numpy(PICTURE),
        "observation/joint_position": msgpack_numpy(STATE[:7]),
        "observation/gripper_position": msgpack_numpy(STATE[:1]),
        "prompt": INSTRUCTION,
    }
    aloha = {
        "images": {"cam_high": msgpack_numpy(PICTURE), "cam_left_wrist": msgpack_numpy(PICTURE)},
        "state": msgpack_numpy(np.zeros(14, np.float32)),
        "prompt": INSTRUCTION,
    }
    lies = {b"__ndarray__": True, b"data": b"1", b"dtype": "|O", b"shape": [1]}
    good = [
        ("libero", OBSERVATION),
        ("droid", droid),
        ("aloha", aloha),
        ("floats, channels first", {**OBSERVATION, "observation/image": msgpack_numpy(floats[0])}),
        ("reset", {"endpoint": "reset"}),
        ("after the reset", OBSERVATION),
    ]
    bad = {
        "floats out of range": {**OBSERVATION, "observation/image": msgpack_numpy(floats[1])},
        "objects": {**OBSERVATION, "observation/image": lies},
        "no prompt": without(OBSERVATION, "prompt"),
        "no picture": {"prompt": INSTRUCTION},
        "unknown endpoint": {"endpoint": "explode"},
        "a list": [1],
    }
    sent = sorted(WIRE.glob("openpi_*_observation*.bin"))
    recorded: Answers = {
        "good": talk(server, "/", [(n, msgpack.packb(one)) for n, one in good], True),
        "captured": talk(server, "/", [(one.stem, one.read_bytes()) for one in sent], True),
        "with a statistics key": talk(
            server, "/?statistics_key=constant", [("libero", msgpack.packb(OBSERVATION))], True
        ),
        "with an unknown statistics key": talk(
            server, "/?statistics_key=nothing", [("libero", msgpack.packb(OBSERVATION))], True
        ),
        "a text frame": talk(server, "/", [("text", "hello"), ("then", "hello")], True),
        "broken": talk(server, "/", [("broken", b"\xc1"), ("then", b"")], True),
        "not a handshake": ask(server, Request("GET", "/")),
    }
    for name, frame in bad.items():
        conversation = [(name, msgpack.packb(frame)), ("then", msgpack.packb(OBSERVATION))]
        recorded[name] = talk(server, "/", conversation, True)
    return recorded


def vla_eval(server: Server) -> Answers:
    def message(kind: str, seq: int, payload: object) -> bytes:
        fields = {"type": kind, "payload": payload, "seq": seq, "timestamp": 0.0}
        return bytes(msgpack.packb(fields))

    sent = [
        ("hello", (WIRE / "vlaeval_00_hello_client.bin").read_bytes()),
        ("episode start", (WIRE / "vlaeval_02_episode_start.bin").read_bytes()),
        ("png", (WIRE / "vlaeval_03_observation_png.bin").read_bytes()),
        ("raw", (WIRE / "vlaeval_05_observation_raw.bin").read_bytes()),
        ("jpeg", (WIRE / "vlaeval_07_observation_jpeg.bin").read_bytes()),
        ("failing", (WIRE / "vlaeval_09_observation_failing.bin").read_bytes()),
        ("no picture", message("observation", 20, {"task_description": "x"})),
        ("no images in it", message("observation", 21, {"images": {}, "task_description": "x"})),
        ("unknown type", message("explosion", 22, {})),
        ("no sequence number", msgpack.packb({"type": "observation", "payload": {}})),
        ("good again", (WIRE / "vlaeval_05_observation_raw.bin").read_bytes()),
        ("episode end", (WIRE / "vlaeval_11_episode_end.bin").read_bytes()),
    ]
    silent = {"hello", "episode start", "episode end"}
    answered = talk(server, "/", sent, True, lambda name: name not in silent)
    broken = [*sent[:3], ("broken", b"\xc1"), ("then", b"\xc1")]
    return {
        "conversation": answered,
        "broken": talk(server, "/", broken, True, lambda name: name not in silent),
    }


def oft_profile(server: Server) -> Answers:
    """`POST /act` as OpenVLA-OFT's robots call it."""
    good = {
        "full_image": json_numpy(PICTURE),
        "wrist_image": json_numpy(PICTURE),
        "state": json_numpy(STATE),
        "instruction": INSTRUCTION,
    }
    bodies: dict[str, Any] = {
        "plain": good,
        "encoded": {"encoded": json.dumps(good)},
        "state as a list": {**good, "state": STATE.tolist()},
        "statistics key is ignored": {**good, "unnorm_key": "nothing"},
        "unknown field is ignored": {**good, "speed": 1},
        "no picture": without(good, "full_image"),
        "no instruction": without(good, "instruction"),
        "picture of OpenVLA's name": {**without(good, "full_image"), "image": json_numpy(PICTURE)},
        "grey": {**good, "full_image": json_numpy(PICTURE[:, :, 0])},
        "floats": {**good, "full_image": json_numpy(PICTURE.astype(np.float32))},
        "encoded and more": {"encoded": "{}", "more": 1},
        "a list": [1],
    }
    recorded = answers(server, {name: post("/act", body) for name, body in bodies.items()})
    for name in ("no picture", "grey", "encoded and more"):
        recorded[f"{name} as a problem"] = ask(server, post("/act", bodies[name], **PROBLEM))
    return recorded


def vla0(server: Server) -> Answers:
    """`POST /predict_base64` as VLA-0's robots call it."""
    file = BytesIO()
    np.save(file, PICTURE)
    picture = base64.b64encode(file.getvalue()).decode()
    good = {"base64_rgb": [picture, picture], "state": [0.0] * 6, "instr": INSTRUCTION}
    bodies: dict[str, Any] = {
        "plain": good,
        "no picture": without(good, "base64_rgb"),
        "no state": without(good, "state"),
        "no instruction": {**good, "instr": None},
        "a PNG": {**good, "base64_rgb": [base64.b64encode(PNG).decode()]},
        "a list": [1],
    }
    return answers(server, {name: post("/predict_base64", one) for name, one in bodies.items()})


def keys_and_limits() -> Answers:
    """A server that asks for keys and takes small messages, few frames and calls by name."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
        keys.write_text(
            f'[arm-1]\nsha256 = "{digests["arm-1"]}"\nrate_per_s = 0.001\nburst = 4\n'
            f'[operator]\nsha256 = "{digests["operator"]}"\nadmin = true\n'
        )
        flags = ("--keys-file", str(keys), "--max-body-bytes", "2000", "--max-image-side", "7")
        named = ("--allowed-hosts", "robots.example", "--no-open-metrics", "--no-dashboard")
        small = ("--max-instruction-chars", "20", "--cors-origins", "http://panel.example")
        return alone(_keys_and_limits, *flags, *named, *small)


KEYS = {"arm-1": "a-key-of-some-robot-arm", "operator": "a-key-of-who-runs-this-all"}


def _keys_and_limits(server: Server) -> Answers:
    arm = {"authorization": f"Bearer {KEYS['arm-1']}"}
    admin = {"authorization": f"Bearer {KEYS['operator']}"}
    small = {**FRAME, "image": {"encoding": "raw", **packed_array(PICTURE[:5, :5])}}
    origin = {"origin": "http://panel.example"}
    return {
        **answers(
            server,
            {
                "no key": post("/v1/act", small, MSGPACK),
                "wrong key": post("/v1/act", small, MSGPACK, authorization="Bearer nothing"),
                "another scheme": post("/v1/act", small, MSGPACK, authorization="Basic eDp5"),
                "info without a key": Request("GET", "/v1/info"),
                "metrics without a key": Request("GET", "/metrics"),
                "healthz without a key": Request("GET", "/healthz"),
                "readyz without a key": Request("GET", "/readyz"),
                "OpenVLA's act without a key": post("/act", {}),
                "unknown path without a key": Request("GET", "/nothing"),
                "openpi without a key": Request("GET", "/"),
                "good": post("/v1/act", small, MSGPACK, **arm),
                "image too large": post("/v1/act", FRAME, MSGPACK, **arm),
                "instruction too long": post(
                    "/v1/act", {**small, "instruction": "x" * 21}, MSGPACK, **arm
                ),
                "body too large": post("/v1/act", b"x" * 2001, MSGPACK, **arm),
                "too many frames": post("/v1/act", small, MSGPACK, **arm),
                "and one more": post("/v1/act", small, MSGPACK, **arm),
                "OpenVLA's body too large": post("/act", b"x" * 2001, **admin),
                "admin by a robot": post("/v1/admin/reset_all", {}, **arm),
                "admin": post("/v1/admin/reset_all", {}, **admin),
                "its name": Request("GET", "/healthz", headers={"host": "robots.example"}),
                "another name": Request("GET", "/healthz", headers={"host": "evil.example"}),
                "known origin": Request("GET", "/v1/info", headers={**admin, **origin}),
                "preflight": Request(
                    "OPTIONS",
                    "/v1/act",
                    headers={**origin, "access-control-request-method": "POST"},
                ),
                "no dashboard": Request("GET", "/dashboard", headers=admin),
            },
        ),
        "stream without a key": talk(server, "/v1/stream", []),
        "stream": talk(
            server,
            "/v1/stream",
            [("frame", msgpack.packb(small))],
            authorization=admin["authorization"],
        ),
        "openpi's socket without a key": talk(server, "/", []),
        "openpi's client with its key": talk(
            server, "/", [], True, authorization=f"Api-Key {KEYS['operator']}"
        ),
    }


def picture(name: str) -> dict[str, Any]:
    return {"encoding": "png", "data": (IMAGES / name).read_bytes()}


# Not ratio-test: each session draws noise of its own.
METHODS = (
    "autoregressive",
    "lossless",
    "deft",
    "spec-vla",
    "spec-vla:radius=34",
    "spec-vla-published",
    "within-bins:radius=11",
    "fly",
    "lvspec",
    "pld",
    "token-recycling",
    "kerv-like",
    "entropy-radius",
    "within-bins:nothing=3",
    "nothing",
)
# A robot that sees the same thing for a while, and then something else.
SEEN = ("case_04.png", "case_04.png", "case_01.png")


def tiny_openvla() -> Answers:
    """Every decoding method over one episode: tokens, actions and what each pass accepted."""
    with serving(*TINY_FLAGS, "--draft-head", str(FILES / "draft_head")) as server:
        recorded: Answers = {"info": ask(server, Request("GET", "/v1/info"))}
        for method in METHODS:
            episode = [
                (
                    f"frame {number}",
                    msgpack.packb(
                        {
                            "image": picture(name),
                            "instruction": INSTRUCTION,
                            "session_id": f"robot of {method}",
                            "decoding": method,
                            "trace": True,
                        }
                    ),
                )
                for number, name in enumerate(SEEN)
            ]
            told = talk(server, "/v1/stream", episode)
            recorded[method] = {name: briefly(frame) for name, frame in told.items()}
        for key in ("libero_spatial", "lab_arm_no_noops", "nothing"):
            body = {"image": picture("case_04.png"), "instruction": "x", "statistics_key": key}
            recorded[f"statistics of {key}"] = ask(server, post("/v1/act", body, MSGPACK))
        body = {"image": picture("case_04.png"), "instruction": "x", "decoding": "spec-vla"}
        for radius in (0, 40):
            recorded[f"radius {radius}"] = ask(
                server, post("/v1/act", {**body, "radius": radius}, MSGPACK)
            )
        for name, fields in {"lists": {"trace": True}, "form": {}}.items():
            sent = {"image": picture("case_04.png"), "instruction": "x", **fields}
            recorded[f"answered in JSON: {name}"] = ask(
                server, post("/v1/act", sent, MSGPACK, accept=JSON)
            )
        for capture in ("plain", "encoded", "error_bad_unnorm_key"):
            body_sent = (WIRE / f"act_{capture}.request.bin").read_bytes()
            recorded[f"OpenVLA's {capture}"] = ask(server, post("/act", body_sent))
        recorded["metrics"] = metrics(server)
    return recorded


def briefly(frame: Any) -> Any:
    """A traced answer in few lines."""
    if not isinstance(frame, dict) or "trace" not in frame.get("binary", {}):
        return frame
    answer = frame["binary"]
    return {
        "fields": ", ".join(answer),
        "actions": answer["actions"]["values"],
        "timings": ", ".join(answer["timings"]),
        "trace": brief_trace(answer["trace"]),
    }


@lru_cache(maxsize=1)
def constant_server() -> dict[str, Any]:
    """Recordings of one server, in this order: its metrics tell of all before."""
    with serving("--policy", "constant") as server:
        return {
            "act_msgpack": act_in_msgpack(server),
            "act_json": act_in_json(server),
            "act_form": act_in_forms(server),
            "stream": stream(server),
            "openvla_act": openvla_act(server),
            "openpi": openpi(server),
            "vla_eval": vla_eval(server),
            "other_addresses": other_addresses(server),
            "metrics": metrics(server),
        }


def of_constant_server(name: str) -> Any:
    return constant_server()[name]


def alone(record: Callable[[Server], Any], *flags: str) -> Any:
    """A recording that has a server of the constant policy for itself."""
    with serving("--policy", "constant", *flags) as server:
        return record(server)


SHARED = (
    *("act_msgpack", "act_json", "act_form", "stream", "openvla_act", "openpi", "vla_eval"),
    *("other_addresses", "metrics"),
)
RECORDINGS: dict[str, Callable[[], Any]] = {
    **{name: partial(of_constant_server, name) for name in SHARED},
    "oft_profile": partial(alone, oft_profile, "--profile", "oft"),
    "vla0": partial(alone, vla0),
    "keys_and_limits": keys_and_limits,
    "tiny_openvla": tiny_openvla,
}
