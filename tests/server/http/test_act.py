"""POST /v1/act: every form it takes, and everything it refuses."""

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version

import msgpack
import numpy as np
import pytest
from fastapi.testclient import TestClient

from deft_client.errors import NoActionError, problem_error
from deft_core.types import ActOptions, Observation, ServerInfo
from deft_core.wire import codec
from deft_core.wire.formats import WireFormat
from deft_core.wire.images import ImageEncoding, encode_image
from deft_core.wire.limits import ReadContext
from deft_core.wire.messages import ActMessage
from deft_policies.constant import ConstantPolicy
from deft_policies.errors import UnknownDecodingError
from deft_server.app import create_app
from deft_server.http.frame_bodies import decode_body
from deft_server.serving.events import FinishedAction
from deft_server.settings import Settings
from tests.server.running import client_of
from tests.standins.policies import MSGPACK, FakePolicy, ThinkingPolicy, frame, packed

pytestmark = pytest.mark.promise

JSON = {"content-type": WireFormat.JSON.value}
PNG = encode_image(frame(8, 200).image, ImageEncoding.PNG)
JPEG = encode_image(frame(8, 200).image, ImageEncoding.JPEG)

PIXEL = {
    "dtype": "uint8",
    "shape": [4, 4, 3],
    "data": base64.b64encode(frame().image.tobytes()).decode(),
}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with client_of(create_app(ConstantPolicy(np.full((1, 7), 0.5)))) as client:
        yield client


def fields(**changes: object) -> dict[str, object]:
    """Return a good message with some fields changed; None takes a field out."""
    message: dict[str, object] = msgpack.unpackb(packed())
    message |= changes
    return {name: value for name, value in message.items() if value is not None}


def image(**changes: object) -> dict[str, object]:
    return {"encoding": "raw", "dtype": "uint8", "shape": [1, 1, 3], "data": b"abc"} | changes


def test_act_returns_the_policys_actions(client: TestClient):
    response = client.post("/v1/act", content=packed(), headers=MSGPACK)
    chunk = codec.decode_answer(response.content)
    np.testing.assert_array_equal(chunk.actions, np.full((1, 7), 0.5))
    assert chunk.timings.total_ms >= chunk.timings.queue_ms


@pytest.mark.parametrize("instruction", ["", " \n"])
def test_an_empty_instruction_is_refused(client: TestClient, instruction: str):
    response = client.post("/v1/act", json={"image": PIXEL, "instruction": instruction})
    assert response.status_code == 422
    assert response.json()["field"] == "instruction"
    assert "empty" in response.json()["detail"]


def test_json_in_json_out(client: TestClient):
    body = {"image": PIXEL, "instruction": "lift the cup"}
    response = client.post("/v1/act", json=body)
    assert response.json()["actions"] == [[0.5] * 7]
    assert "id" not in response.json()
    assert client.post("/v1/act", json={**body, "id": "f-1"}).json()["id"] == "f-1"


def test_a_form_with_a_picture_is_answered_in_json(client: TestClient):
    for name, data in (("x.png", PNG), ("x.jpg", JPEG)):
        response = client.post(
            "/v1/act", files={"image": (name, data)}, data={"instruction": "lift the cup"}
        )
        assert response.json()["actions"] == [[0.5] * 7], response.text


def test_a_form_carries_cameras_state_and_options():
    policy = FakePolicy()
    with client_of(create_app(policy)) as client:
        response = client.post(
            "/v1/act",
            files={"image": ("x.png", PNG), "camera.wrist": ("w.jpg", JPEG)},
            data={"instruction": "lift", "state": "[1, 2.5]", "session_id": "a", "radius": "3"},
        )
    assert response.status_code == 200
    asked = policy.batches[0][0]
    assert asked.observation.cameras["wrist"].shape == (8, 8, 3)
    assert asked.observation.state is not None
    np.testing.assert_array_equal(asked.observation.state, [1, 2.5])
    assert (asked.options.session_id, asked.options.radius) == ("a", 3)


@pytest.mark.parametrize(
    ("accept", "sent", "kind"),
    [
        ("", MSGPACK, WireFormat.MSGPACK.value),
        ("*/*", MSGPACK, WireFormat.MSGPACK.value),
        ("application/json", MSGPACK, WireFormat.JSON.value),
        ("application/msgpack", JSON, WireFormat.MSGPACK.value),
        ("*/*", JSON, WireFormat.JSON.value),
        ("*/*", {"content-type": "application/msgpack; v=1"}, WireFormat.MSGPACK.value),
        ("*/*", {"content-type": "Application/MsgPack"}, WireFormat.MSGPACK.value),
        ("Application/MsgPack", JSON, WireFormat.MSGPACK.value),
        ("Application/JSON", MSGPACK, WireFormat.JSON.value),
    ],
)
def test_the_answer_comes_as_it_was_asked_for(
    client: TestClient, accept: str, sent: dict[str, str], kind: str
):
    wire_format = WireFormat.JSON if sent is JSON else WireFormat.MSGPACK
    body = codec.encode_request(ActMessage(frame()), wire_format=wire_format)
    response = client.post("/v1/act", content=body, headers=sent | {"accept": accept})
    assert response.headers["content-type"] == kind


def test_a_trace_is_sent_only_where_it_is_wanted(client: TestClient):
    response = client.post("/v1/act", content=packed(), headers=MSGPACK)
    assert codec.decode_answer(response.content).trace is None


def bomb() -> bytes:
    """Return a PNG that claims 60,000 x 60,000 pixels: 10 GB if anybody believed it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels)


BAD_MESSAGES = {
    "empty body": (b"", 400, "body"),
    "truncated msgpack": (packed()[:-9], 400, "body"),
    "not a map": (msgpack.packb([1, 2]), 400, "body"),
    "no image": (msgpack.packb(fields(image=None)), 400, "image"),
    "no instruction": (msgpack.packb(fields(instruction=None)), 400, "instruction"),
    "unknown field": (msgpack.packb(fields(sesion_id="a")), 400, "sesion_id"),
    "wrong dtype": (msgpack.packb(fields(image=image(dtype="float32"))), 422, "image.dtype"),
    "object dtype": (msgpack.packb(fields(image=image(dtype="|O"))), 422, "image.dtype"),
    "wrong shape": (msgpack.packb(fields(image=image(shape=[3, 1]))), 422, "image.shape"),
    "negative shape": (msgpack.packb(fields(image=image(shape=[-1, 1, 3]))), 422, "image.shape[0]"),
    "huge shape": (msgpack.packb(fields(image=image(shape=[2**20, 2**20, 3]))), 413, "image.shape"),
    "too few pixels": (msgpack.packb(fields(image=image(data=b"ab"))), 422, "image.data"),
    "decompression bomb": (
        msgpack.packb(fields(image={"encoding": "png", "data": bomb()})), 413, "image",
    ),
    "broken png": (
        msgpack.packb(fields(image={"encoding": "png", "data": PNG[:-20]})), 422, "image",
    ),
    "unknown encoding": (
        msgpack.packb(fields(image={"encoding": "bmp", "data": b"BM"})), 415, "image.encoding",
    ),
    "NaN state": (
        msgpack.packb(
            fields(
                state={"dtype": "float32", "shape": [1], "data": np.float32("nan").tobytes()}
            )
        ),
        422, "state",
    ),
    "instruction that is not UTF-8": (
        packed().replace(b"lift the cup", b"lift\xff\xfe\xfd cup!"[:12]), 400, "body",
    ),
    "instruction of 1 MB": (msgpack.packb(fields(instruction="a" * 2**20)), 413, "instruction"),
    "instruction that is a number": (msgpack.packb(fields(instruction=3)), 422, "instruction"),
    "deadline in the past": (msgpack.packb(fields(deadline_ms=-1)), 422, "deadline_ms"),
    "later version": (msgpack.packb(fields(v=2)), 415, "v"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_a_bad_message_is_refused_with_the_name_of_its_field(client: TestClient, name: str):
    body, status, field = BAD_MESSAGES[name]
    response = client.post("/v1/act", content=body, headers=MSGPACK)
    problem = response.json()
    assert (response.status_code, problem["field"]) == (status, field), problem
    assert response.headers["content-type"] == "application/problem+json"
    assert problem["status"] == status
    assert problem["request_id"] == response.headers["x-request-id"]
    assert "Traceback" not in response.text
    assert client.post("/v1/act", content=packed(), headers=MSGPACK).status_code == 200


def test_an_unknown_statistics_key_is_answered_with_those_there_are(client: TestClient):
    body = packed(ActOptions(statistics_key="bridge"))
    problem = client.post("/v1/act", content=body, headers=MSGPACK).json()
    assert (problem["status"], problem["field"]) == (422, "statistics_key")
    assert "known keys: constant" in problem["detail"]


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "image/png", "application/x-msgpack", "x" * 300]
)
def test_an_unknown_content_type_is_refused_with_those_there_are(client: TestClient, kind: str):
    response = client.post("/v1/act", content=packed(), headers={"content-type": kind})
    assert response.status_code == 415
    assert "application/msgpack" in response.json()["detail"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", "body"),
        (b"\xff\xfe", "body"),
        (b"[]", "body"),
        (b'{"instruction": "a", "instruction": "b"}', "image"),
        (json.dumps({"image": [[[1, 2]]], "instruction": "a"}).encode(), "image"),
        (b'{"image": {"encoding": "png", "data": "?"}, "instruction": "a"}', "image.data"),
    ],
)
def test_bad_json_is_refused_with_the_name_of_its_field(
    client: TestClient, body: bytes, field: str
):
    response = client.post("/v1/act", content=body, headers=JSON)
    assert response.status_code in (400, 422)
    assert response.json()["field"] == field


def form(*parts: bytes, end: bytes = b"--xyz--\r\n") -> bytes:
    return b"".join(b"--xyz\r\n" + part + b"\r\n" for part in parts) + end


TEXT = b'content-disposition: form-data; name="instruction"\r\n\r\nlift'
FILE = b'content-disposition: form-data; name="image"; filename="x.png"\r\n\r\n' + PNG
BAD_FORMS = {
    "cut off": (form(TEXT, FILE)[:-20], 400, "body"),
    "no end": (form(TEXT, FILE, end=b""), 400, "body"),
    "nothing": (b"", 400, "body"),
    "garbage": (b"garbage", 400, "body"),
    "no image": (form(TEXT), 400, "image"),
    "no instruction": (form(FILE), 400, "instruction"),
    "a part without a name": (form(b"content-type: text/plain\r\n\r\nhi", TEXT, FILE), 400, "body"),
    "a field twice": (form(TEXT, TEXT, FILE), 400, "instruction"),
    "an image that is text": (
        form(TEXT, b'content-disposition: form-data; name="image"\r\n\r\n@x.png'), 422, "image",
    ),
    "a radius that is no number": (
        form(TEXT, FILE, b'content-disposition: form-data; name="radius"\r\n\r\nnine'),
        422, "radius",
    ),
    "too many parts": (form(*[TEXT] * 100), 413, "body"),
    "text that is not UTF-8": (
        form(b'content-disposition: form-data; name="instruction"\r\n\r\n\xff\xfe', FILE),
        422, "instruction",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FORMS)
def test_a_bad_form_is_refused_with_the_name_of_its_field(client: TestClient, name: str):
    body, status, field = BAD_FORMS[name]
    headers = {"content-type": "multipart/form-data; boundary=xyz"}
    response = client.post("/v1/act", content=body, headers=headers)
    assert (response.status_code, response.json()["field"]) == (status, field), response.text


def test_a_form_cannot_hide_bytes_in_its_headers(client: TestClient):
    body = form(b"x-long: " + b"a" * 10_000 + b"\r\n\r\n", TEXT, FILE)
    headers = {"content-type": "multipart/form-data; boundary=xyz"}
    response = client.post("/v1/act", content=body, headers=headers)
    assert response.status_code in (400, 413)  # our limit, or that of the library
    assert response.json()["field"] == "body"


def test_a_form_without_a_boundary_is_refused(client: TestClient):
    headers = {"content-type": "multipart/form-data"}
    response = client.post("/v1/act", content=form(TEXT, FILE), headers=headers)
    assert (response.status_code, response.json()["field"]) == (400, "content-type")


def test_a_body_beyond_the_limit_is_refused_early(client: TestClient):
    limit = Settings().max_body_bytes
    body = bytes(limit + 10 * 1024 * 1024)
    announced = client.post("/v1/act", content=body, headers=MSGPACK)
    assert (announced.status_code, announced.json()["field"]) == (413, "body")

    def parts() -> Iterator[bytes]:
        for start in range(0, len(body), 2**20):
            yield body[start : start + 2**20]

    unannounced = client.post("/v1/act", content=parts(), headers=MSGPACK)
    assert (unannounced.status_code, unannounced.json()["field"]) == (413, "body")
    assert client.get("/healthz").text == "OK\n"


def test_all_bodies_together_are_bounded():
    body = packed(observation=frame(64))
    settings = Settings(max_total_bytes=len(body) - 1)
    with client_of(create_app(ConstantPolicy(), settings)) as client:
        for _ in range(3):
            assert client.post("/v1/act", content=body, headers=MSGPACK).status_code == 429
            assert client.post("/v1/act", content=packed(), headers=MSGPACK).status_code == 200


def test_the_limits_of_a_request_are_settings():
    settings = Settings(max_instruction_chars=5, max_image_side=8, max_body_bytes=2000)
    with client_of(create_app(ConstantPolicy(), settings)) as client:
        for observation in (frame(8), frame(9, instruction="lift"), frame(40, instruction="lift")):
            body = packed(observation=observation)
            refused = client.post("/v1/act", content=body, headers=MSGPACK)
            assert refused.status_code == 413


def test_a_server_may_fix_its_decoding():
    with client_of(create_app(ConstantPolicy(), Settings(allow_options=False))) as client:
        body = packed(ActOptions(radius=9))
        response = client.post("/v1/act", content=body, headers=MSGPACK)
    assert (response.status_code, response.json()["field"]) == (422, "radius")


def packed_with_state() -> bytes:
    return packed(observation=Observation(frame(8).image, "lift it", {"left": frame(8).image},
                  np.zeros(3, np.float32)))  # fmt: skip


def test_what_the_policy_does_not_look_at_is_said_once(caplog: pytest.LogCaptureFixture):
    with client_of(create_app(ConstantPolicy())) as client:
        for _ in range(3):
            answer = client.post("/v1/act", content=packed_with_state(), headers=MSGPACK)
            assert answer.status_code == 200
    lines = [one.getMessage() for one in caplog.records if "said once" in one.getMessage()]
    assert len(lines) == 2
    assert "have cameras: the policy does not look at left" in lines[0]
    assert "have state: the policy reads no state" in lines[1]


def test_a_state_that_the_policy_does_not_read_is_said_once_for_each_caller(
    caplog: pytest.LogCaptureFixture,
):
    with client_of(create_app(ConstantPolicy())) as client:
        for address in ("10.0.0.7", "10.0.0.8"):
            client._transport.client = (address, 1)  # type: ignore[attr-defined]
            client.post("/v1/act", content=packed_with_state(), headers=MSGPACK)
    lines = [one.getMessage() for one in caplog.records if "reads no state" in one.getMessage()]
    assert [line.split()[2] for line in lines] == ["anonymous@10.0.0.7", "anonymous@10.0.0.8"]


def test_a_strict_server_refuses_what_the_policy_does_not_look_at():
    with client_of(create_app(ConstantPolicy(), Settings(strict_inputs=True))) as client:
        refused = client.post("/v1/act", content=packed_with_state(), headers=MSGPACK)
        assert client.post("/v1/act", content=packed(), headers=MSGPACK).status_code == 200
    assert (refused.status_code, refused.json()["field"]) == (422, "cameras")
    assert "the policy does not look at left; leave it out" in refused.json()["detail"]


@dataclass(eq=False)
class TaughtPolicy(FakePolicy):
    """Knows two instructions, and the method `autoregressive` alone."""

    @property
    def info(self) -> ServerInfo:
        known = ("lift the cup", "Lift the Pan.")
        return replace(super().info, instructions=known, decoding="autoregressive")

    def check(self, observation: Observation, options: ActOptions) -> None:
        if options.decoding not in (None, "autoregressive"):
            raise UnknownDecodingError(options.decoding, ("autoregressive",))


def test_an_instruction_that_the_policy_was_not_taught_is_answered_with_a_note(
    caplog: pytest.LogCaptureFixture,
):
    """'Make me a coffee' moved the arm without a word."""
    asked = ActOptions(want_notes=True)
    with client_of(create_app(TaughtPolicy())) as client:
        for said, options, has_note in (
            ("lift the cup", asked, False),
            ("Lift  the cup.", asked, False),
            ("lift the pan", asked, False),
            ("make me a coffee", asked, True),
            ("make me a coffee", ActOptions(), False),
        ):
            body = packed(options, frame(instruction=said))
            answer = client.post("/v1/act", content=body, headers=MSGPACK)
            notes = codec.decode_answer(answer.content).notes
            known = ("the instruction is not among the 2 that the policy was trained on",)
            assert notes == (known if has_note else ()), said
    lines = [one for one in caplog.messages if "said once" in one]
    assert len(lines) == 1
    assert "an unknown instruction: the instruction is not among the 2" in lines[0]


def test_a_policy_that_says_nothing_of_its_training_has_no_notes(client: TestClient):
    body = packed(ActOptions(want_notes=True))
    answer = client.post("/v1/act", content=body, headers=MSGPACK)
    assert codec.decode_answer(answer.content).notes == ()


def test_plain_is_a_name_for_autoregressive_decoding():
    with client_of(create_app(TaughtPolicy())) as client:
        statuses = [
            client.post("/v1/act", content=packed(ActOptions(decoding=name)), headers=MSGPACK)
            for name in ("plain", "autoregressive", "plainly")
        ]
    assert [one.status_code for one in statuses] == [200, 200, 422]


@dataclass(eq=False)
class WristPolicy(FakePolicy):
    """Looks at the frame and at a wrist camera."""

    @property
    def info(self) -> ServerInfo:
        return replace(super().info, num_pictures=2, cameras=("image", "wrist"))


def test_a_camera_that_the_policy_does_not_look_at_is_refused_unless_that_is_allowed():
    """A `gripper_cam` was ignored, with a line in the server's log alone."""
    picture = frame().image
    for names, settings, status in (
        (("wrist",), Settings(), 200),
        (("left_wrist",), Settings(), 200),
        (("gripper_cam",), Settings(), 422),
        (("wrist", "front"), Settings(), 422),
        (("gripper_cam",), Settings(ignore_cameras=True), 200),
    ):
        seen = replace(frame(), cameras=dict.fromkeys(names, picture))
        with client_of(create_app(WristPolicy(), settings)) as client:
            answer = client.post("/v1/act", content=packed(observation=seen), headers=MSGPACK)
            assert client.get("/v1/info").json()["cameras"] == ["image", "wrist"]
        assert answer.status_code == status, names
        if status == 422:
            assert answer.json()["field"] == "cameras"
            assert "it knows image, wrist" in answer.json()["detail"]
            assert "--ignore-cameras" in answer.json()["detail"]


@dataclass(eq=False)
class BlinkeredPolicy(FakePolicy):
    """Looks at the frame alone, and says so."""

    @property
    def info(self) -> ServerInfo:
        return replace(super().info, cameras=("image",))


def test_a_peers_client_may_send_cameras_that_the_policy_does_not_look_at():
    picture = frame().image
    data = base64.b64encode(picture.tobytes()).decode()
    wire = {"__numpy__": data, "dtype": "uint8", "shape": list(picture.shape)}
    fields = {"full_image": wire, "instruction": "lift", "wrist_image": wire}
    with client_of(create_app(BlinkeredPolicy(), Settings(profile="oft"))) as client:
        answer = client.post("/act", json=fields)
    assert answer.status_code == 200, answer.text


def test_a_request_id_is_kept_if_it_is_harmless_and_replaced_if_not(client: TestClient):
    assert client.get("/healthz", headers={"x-request-id": "a-1"}).headers["x-request-id"] == "a-1"
    for bad in ("a" * 65, "a b", "ü", '"'):
        headers = {"x-request-id": bad.encode("latin-1")}
        answer = client.get("/healthz", headers=headers)
        assert answer.headers["x-request-id"] not in (bad, "")


def test_a_wrong_address_or_method_is_a_problem_too(client: TestClient):
    for response, status in ((client.get("/v2/act"), 404), (client.get("/v1/act"), 405)):
        assert response.status_code == status
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["status"] == status


def test_a_session_remembers_until_it_is_reset():
    with client_of(create_app(FakePolicy())) as client:

        def count() -> float:
            body = packed(ActOptions(session_id="a"))
            answer = client.post("/v1/act", content=body, headers=MSGPACK)
            return float(codec.decode_answer(answer.content).actions[0, 0])

        assert [count(), count()] == [1, 2]
        assert client.post("/v1/reset", json={"session_id": "a"}).json() == {"existed": True}
        assert client.post("/v1/reset", json={"session_id": "a"}).json() == {"existed": False}
        assert count() == 1


@pytest.mark.parametrize("body", [b"", b"{}", b'{"session_id": 3}', b'{"session_id": "a", "x": 1}'])
def test_a_bad_reset_is_refused(client: TestClient, body: bytes):
    response = client.post("/v1/reset", content=body, headers=JSON)
    assert response.status_code in (400, 422)
    assert response.json()["field"]


def test_info_says_what_is_served(client: TestClient):
    info = codec.decode_info(client.get("/v1/info").content)
    assert info.versions == {"deft-vla": version("deft-vla"), "deft-client": version("deft-client")}
    assert replace(info, versions={}, details={}) == ConstantPolicy().info
    assert set(info.details) == {
        "POST /act (openvla)",
        "POST /predict_base64 (VLA-0)",
        "POST /v1/act, WebSocket /v1/stream (deft)",
        "WebSocket / (openpi)",
        "WebSocket / (vla-eval)",
        "WebSocket /v1/realtime/robot/openpi (vLLM-Omni)",
    }


def test_messages_with_pictures_are_told_from_raw_ones():
    wrist = {"wrist": frame(8).image}
    seen = Observation(frame(64).image, "lift", wrist, np.zeros(8, np.float32))
    for encoding in ImageEncoding:
        body = codec.encode_request(ActMessage(seen), encoding)
        request = codec.parse_request(body)
        assert codec.needs_decoding(request) == (encoding is not ImageEncoding.RAW)
    mixed = fields(cameras={"wrist": {"encoding": "png", "data": PNG}})
    assert codec.needs_decoding(codec.parse_request(msgpack.packb(mixed)))


def test_a_content_type_may_carry_parameters():
    message = decode_body("application/msgpack; version=1", packed(), ReadContext())
    assert message.observation.instruction == "lift the cup"


def test_a_text_comes_with_the_actions_where_it_is_asked_for():
    with client_of(create_app(ThinkingPolicy())) as client:
        asked = packed(ActOptions(want_reasoning=True, max_tokens=40))
        for headers in (MSGPACK, {**MSGPACK, "accept": WireFormat.JSON.value}):
            answer = client.post("/v1/act", content=asked, headers=headers)
            wire_format = WireFormat(answer.headers["content-type"])
            assert (wire_format is WireFormat.MSGPACK) == (headers is MSGPACK)
            chunk = codec.decode_answer(answer.content, wire_format)
            assert chunk.reasoning == " lift the cup ACTION: x"
        answer = client.post("/v1/act", content=packed(), headers=MSGPACK)
        assert codec.decode_answer(answer.content).reasoning is None


def test_who_watches_sees_the_text_that_the_caller_did_not_ask_for():
    app = create_app(ThinkingPolicy())
    with client_of(app) as client:
        seen: list[FinishedAction] = []
        app.service.events.listen(seen.append)
        answer = client.post("/v1/act", content=packed(), headers=MSGPACK)
        assert codec.decode_answer(answer.content).reasoning is None
        client.post("/v1/act", content=packed(observation=frame(instruction="ponder")),
                    headers=MSGPACK)  # fmt: skip
    assert seen[0].chunk.reasoning == " lift the cup ACTION: x"
    assert seen[1].error.reasoning == " why? <b>"


def test_a_text_without_an_action_is_an_error_and_is_remembered():
    policy = ThinkingPolicy()
    with client_of(create_app(policy)) as client:
        session = ActOptions(session_id="arm")
        for instruction, status in (("ponder", 500), ("lift the cup", 200)):
            body = packed(session, frame(instruction=instruction))
            answer = client.post("/v1/act", content=body, headers=MSGPACK)
            assert answer.status_code == status
            if status == 500:
                error = problem_error(codec.decode_problem(500, answer.content))
                assert isinstance(error, NoActionError)
                assert error.reasoning == " why? <b>"
                assert "7 are needed" in error.detail
                assert answer.json()["type"] == "urn:deft:problem:no_action"
        assert client.get("/readyz").status_code == 200
    assert policy.batches[1][0].memory.num_steps == 1
