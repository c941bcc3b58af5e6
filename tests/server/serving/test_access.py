"""API keys, rates, web origins."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError
from starlette.testclient import WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from deft_core.types import ActOptions
from deft_policies.constant import ConstantPolicy
from deft_server.app import create_app
from deft_server.commands import key as new_key
from deft_server.errors import ForbiddenError, MissingKeyError, OverloadedError, WrongHostError
from deft_server.http import watches
from deft_server.serving import access as access_module
from deft_server.serving.access import Access, Caller, KeyFileError, read_keys
from deft_server.settings import Settings
from tests.server.process import serving
from tests.server.running import client_of
from tests.standins.policies import MSGPACK, FakePolicy, packed

ARM, ADMIN = "arm-secret-0123456789", "admin-secret-0123456789"
SLOW = "slow-secret-0123456789"
DIGEST = hashlib.sha256(ADMIN.encode()).hexdigest()
FILE = f'[arm-1]\nkey = "{ARM}"\n\n[boss]\nsha256 = "{DIGEST}"\nadmin = true\n'


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def client(keys: Path) -> Iterator[TestClient]:
    with client_of(create_app(FakePolicy(), Settings(keys_file=keys))) as client:
        yield client


def test_a_key_names_its_caller(keys: Path):
    access = Access(keys)
    assert access.identify(f"Bearer {ARM}", "").name == "arm-1"
    boss = access.identify(f"Api-Key {ADMIN}", "")
    assert (boss.name, boss.is_admin) == ("boss", True)


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer nope", f"Basic {ARM}", ARM, "Bearer ÿ"])
def test_anything_else_is_refused(keys: Path, header: str):
    with pytest.raises(MissingKeyError):
        Access(keys).identify(header, "")


def test_without_keys_everybody_is_anonymous():
    caller = Access().identify("", "10.0.0.7")
    assert (caller.name, caller.address, caller.is_admin) == ("anonymous", "10.0.0.7", False)
    with pytest.raises(ForbiddenError):
        Access().require_admin(caller)


def test_keys_are_read_again_when_the_file_changes(keys: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(access_module, "RECHECK_S", 0.0)
    access = Access(keys)
    keys.write_text('[arm-2]\nkey = "another-secret-0123"\n')
    assert access.identify("Bearer another-secret-0123", "").name == "arm-2"
    with pytest.raises(MissingKeyError):
        access.identify(f"Bearer {ARM}", "")


def test_a_broken_key_file_leaves_the_old_keys_in_use(keys: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(access_module, "RECHECK_S", 0.0)
    access = Access(keys)
    keys.write_text("[arm-1\n")
    assert access.identify(f"Bearer {ARM}", "").name == "arm-1"
    os.remove(keys)
    assert access.identify(f"Bearer {ARM}", "").name == "arm-1"


def test_keys_that_cannot_be_read_are_a_metric_until_they_can(
    keys: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(access_module, "RECHECK_S", 0.0)
    text = keys.read_text()
    metrics = create_app(ConstantPolicy(), Settings(keys_file=keys)).service.metrics
    assert b"deft_keys_usable 1.0" in metrics.page()
    os.remove(keys)
    assert b"deft_keys_usable 0.0" in metrics.page()
    keys.write_text(text)
    assert b"deft_keys_usable 1.0" in metrics.page()


def test_a_pipe_in_place_of_the_key_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "keys.toml")
    with pytest.raises(KeyFileError, match="is not a regular file"):
        read_keys(tmp_path / "keys.toml")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a]\n", "needs either key"),
        ('[a]\nkey = "short"\n', "16 characters"),
        ('[a]\nsha256 = "zz"\n', "needs either key"),
        (f'[a]\nsha256 = "{"g" * 64}"\n', "64 hex digits"),
        (f'[a]\nkey = "{ARM}"\nsha256 = "{DIGEST}"\n', "needs either key"),
        (f'[a]\nkey = "{ARM}"\nrate = 3\n', "unknown entry 'rate'"),
        (f'[a]\nkey = "{ARM}"\nrate_per_s = -3\n', "above 0"),
        (f'[a]\nkey = "{ARM}"\nrate_per_s = true\n', "above 0"),
        (f'[a]\nkey = "{ARM}"\nadmin = "no"\n', "true or false"),
        ("a = 3\n", "must be a table"),
        ("[a\n", "key file"),
    ],
)
def test_a_key_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, complaint: str):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(KeyFileError, match=complaint):
        Access(path)


def test_a_missing_key_file_is_an_error(tmp_path: Path):
    with pytest.raises(KeyFileError, match="key file"):
        Access(tmp_path / "none.toml")


def test_a_caller_beyond_its_rate_is_told_how_long_to_wait():
    access, caller = Access(), Caller("arm", rate_per_s=10, burst=2)
    access.admit_frame(caller, 0.0)
    access.admit_frame(caller, 0.0)
    with pytest.raises(OverloadedError) as refusal:
        access.admit_frame(caller, 0.0)
    assert refusal.value.retry_after_s == pytest.approx(0.1)
    access.admit_frame(caller, 0.11)
    access.admit_frame(Caller("other", rate_per_s=10), 0.11)


def test_a_caller_whose_frames_stay_is_slowed_down_to_its_rate():
    access, caller = Access(), Caller("old client", rate_per_s=10, burst=1, overfills_s=0.15)
    assert [access.admit_frame(caller, 0.0) for _ in range(2)] == pytest.approx([0.0, 0.1])
    with pytest.raises(OverloadedError):
        access.admit_frame(caller, 0.0)


def test_frames_over_the_rate_get_429_and_retry_after():
    settings = Settings(rate_per_s=0.1)
    with client_of(create_app(ConstantPolicy(), settings)) as client:
        codes = [
            client.post("/v1/act", content=packed(), headers=MSGPACK).status_code for _ in range(3)
        ]
        refused = client.post("/v1/act", content=packed(), headers=MSGPACK)
        page = client.get("/metrics").text
    assert 'deft_unanswered_frames_total{reason="OverloadedError"} 3.0' in page
    assert 'deft_policy_failures_total{kind="lost"} 0.0' in page
    assert codes[0] == 200
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "10"
    assert refused.json()["retry_after_s"] <= 10


def test_every_refused_frame_is_counted_for_its_key(client: TestClient):
    auth = {"authorization": f"Bearer {ARM}"}
    for headers, body in (
        (MSGPACK, packed()),
        ({**MSGPACK, **auth}, b"no message"),
        ({**MSGPACK, **auth}, packed(ActOptions(decoding="none"))),
        ({**MSGPACK, **auth}, packed()),
    ):
        client.post("/v1/act", content=body, headers=headers)
    page = client.get("/metrics").text
    assert 'deft_key_frames_total{key="(none)",outcome="not answered"} 1.0' in page
    assert 'deft_key_frames_total{key="arm-1",outcome="not answered"} 2.0' in page
    assert 'deft_key_frames_total{key="arm-1",outcome="answered"} 1.0' in page
    assert 'deft_unanswered_frames_total{reason="MissingKeyError"} 1.0' in page


@pytest.mark.parametrize("path", ["/v1/act", "/v1/reset"])
def test_no_frame_is_taken_without_a_key(client: TestClient, path: str):
    refused = client.post(path, content=packed(), headers=MSGPACK)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json()["request_id"] == refused.headers["x-request-id"]


def test_a_frame_is_taken_with_a_key(client: TestClient):
    answer = client.post("/v1/act", content=packed(), headers=MSGPACK | bearer(ARM))
    assert answer.status_code == 200


def test_paths_that_do_not_exist_are_behind_the_key_too(client: TestClient):
    assert client.get("/v1/secret").status_code == 401
    assert client.get("/v1/secret", headers=bearer(ARM)).status_code == 404


@pytest.mark.parametrize("path", ["/healthz", "/health", "/readyz", "/metrics", "/openapi.json"])
def test_health_needs_no_key(client: TestClient, path: str):
    assert client.get(path).status_code == 200


def test_metrics_may_be_put_behind_the_key(keys: Path):
    settings = Settings(keys_file=keys, open_metrics=False)
    with client_of(create_app(ConstantPolicy(), settings)) as client:
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers=bearer(ARM)).status_code == 200


def test_only_an_administrator_may_reset_all(client: TestClient):
    path = "/v1/admin/reset_all"
    client.post(
        "/v1/act",
        files={"image": ("x.png", PNG)},
        data={"instruction": "lift", "session_id": "a"},
        headers=bearer(ARM),
    )
    assert client.post(path).status_code == 401
    assert client.post(path, headers=bearer(ARM)).status_code == 403
    assert client.post(path, headers=bearer(ADMIN)).json() == {"ended": 1}
    assert client.post(path, headers=bearer(ADMIN)).json() == {"ended": 0}


def test_a_stream_without_a_key_is_refused_before_it_opens(client: TestClient):
    with pytest.raises(WebSocketDenialResponse) as denial, client.websocket_connect("/v1/stream"):
        pass
    assert denial.value.status_code == 401
    assert denial.value.json()["title"] == "API key needed"


def test_a_stream_with_a_key_opens(client: TestClient):
    with client.websocket_connect("/v1/stream", headers=bearer(ARM)) as socket:
        socket.send_bytes(packed())
        assert socket.receive_bytes()


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1.evil"])
def test_web_pages_of_other_sites_may_not_call(origin: str):
    headers = MSGPACK | {"origin": origin}
    with client_of(create_app(ConstantPolicy())) as client:
        refused = client.post("/v1/act", content=packed(), headers=headers)
        assert refused.status_code == 403
        with pytest.raises(WebSocketDenialResponse) as denial:
            client.websocket_connect("/v1/stream", headers={"origin": origin}).__enter__()
        assert denial.value.status_code == 403


def test_a_key_taken_out_of_the_file_ends_its_open_streams(
    keys: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(access_module, "RECHECK_S", 0.0)
    with (
        client_of(create_app(FakePolicy(), Settings(keys_file=keys))) as client,
        client.websocket_connect("/v1/stream", headers=bearer(ARM)) as socket,
    ):
        socket.send_bytes(packed())
        assert socket.receive_bytes()
        keys.write_text('[arm-1]\nkey = "another-secret-0123"\n')
        socket.send_bytes(packed())
        assert "not known here" in socket.receive_text()


def test_a_new_rate_applies_to_open_streams(keys: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(access_module, "RECHECK_S", 0.0)
    access = Access(keys)
    caller = access.identify(f"Bearer {ARM}", "")
    access.admit_frame(caller, 0.0)
    keys.write_text(FILE.replace("[boss]", "rate_per_s = 1\n\n[boss]"))
    access.admit_frame(caller, 0.0)
    with pytest.raises(OverloadedError):
        access.admit_frame(caller, 0.0)


def test_robots_with_one_key_keep_their_own_address_and_share_its_rate(keys: Path):
    """Two of VLA-0's clients with one key used to have one session, and each other's memory."""
    keys.write_text(FILE.replace("[boss]", "rate_per_s = 1\n\n[boss]"))
    access = Access(keys)
    first, second = (access.identify(f"Bearer {ARM}", one) for one in ("10.0.0.7", "10.0.0.8"))
    assert (first.address, second.address) == ("10.0.0.7", "10.0.0.8")
    assert first.owner == second.owner
    access.admit_frame(first, 0.0)
    with pytest.raises(OverloadedError):
        access.admit_frame(second, 0.0)


def test_our_own_pages_and_listed_ones_may_call():
    app = create_app(ConstantPolicy(), Settings(cors_origins=("https://lab.example",)))
    with client_of(app) as client:
        for origin in ("http://127.0.0.1", "https://lab.example"):
            answer = client.post("/v1/act", content=packed(), headers=MSGPACK | {"origin": origin})
            assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://lab.example"


LAB = {"origin": "https://lab.example"}


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, b"", 401),
        (bearer(ARM) | {"content-type": "text/plain"}, b"a", 415),
        (bearer(ARM) | MSGPACK, b"{", 400),
        (bearer(ARM) | MSGPACK, bytes(30_000_000), 413),
        (bearer(SLOW) | MSGPACK, packed(), 429),
    ],
)
def test_a_page_of_another_site_reads_why_it_was_refused(
    keys: Path, headers: dict[str, str], body: bytes, status: int
):
    """A browser shows a page only the answers that name its origin."""
    with keys.open("a") as file:
        file.write(f'\n[slow]\nkey = "{SLOW}"\nrate_per_s = 0.001\n')
    settings = Settings(keys_file=keys, cors_origins=("https://lab.example",))
    with client_of(create_app(FakePolicy(), settings)) as client:
        client.post("/v1/act", content=packed(), headers=bearer(SLOW) | MSGPACK)
        answer = client.post("/v1/act", content=body, headers=headers | LAB)
        unlisted = client.post("/v1/act", headers={"origin": "https://other.example"})
    assert answer.status_code == status, answer.text
    assert answer.headers["access-control-allow-origin"] == "https://lab.example"
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"Retry-After", "X-Request-Id"} <= set(exposed)
    assert unlisted.status_code == 403
    assert "access-control-allow-origin" not in unlisted.headers


def test_a_page_of_another_site_may_send_our_headers():
    app = create_app(FakePolicy(), Settings(cors_origins=("https://lab.example",)))
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-request-id, "
        "x-deft-session, x-deft-errors",
    }
    with client_of(app) as client:
        assert client.options("/v1/act", headers=LAB | asked).status_code == 200


def test_cors_is_off_unless_asked_for():
    with client_of(create_app(ConstantPolicy())) as client:
        answer = client.get("/v1/info", headers={"origin": "https://lab.example"})
    assert "access-control-allow-origin" not in answer.headers


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
)


def test_a_new_key_opens_the_door_it_is_made_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert new_key.main(['arm "left"', "--admin", "--rate-per-s", "40"]) == 0
    said = capsys.readouterr()
    path = tmp_path / "keys.toml"
    path.write_text(said.out)
    key = said.err.strip().rpartition(" ")[2]
    assert key not in said.out
    caller = Access(path).identify(f"Bearer {key}", "")
    assert (caller.name, caller.is_admin, caller.rate_per_s) == ('arm "left"', True, 40)


@pytest.mark.parametrize(
    "host",
    ["localhost:8000", "LocalHost.", "arm.localhost", "192.0.2.7:80", "[::1]:8000", "[2001:db8::1]",
     "robots.lab.example", "gpu.lab.example:443"],
)  # fmt: skip
def test_addresses_this_machine_and_listed_names_lead_here(host: str):
    access = Access(hosts=("robots.lab.example", "GPU.*"))
    access.check_host([host])


@pytest.mark.parametrize(
    "hosts",
    [["evil.example"], ["evil.example:8000"], ["127.0.0.1.evil.example"],
     ["localhost.evil.example"], ["[evil]"], [""], [], ["127.0.0.1", "127.0.0.1"]],
)  # fmt: skip
def test_other_names_no_name_and_two_names_do_not(hosts: list[str]):
    with pytest.raises(WrongHostError):
        Access().check_host(hosts)


@pytest.mark.parametrize(
    "path", ["/v1/info", "/dashboard", "/dashboard/", "/openapi.json", "/docs"]
)
def test_a_web_page_whose_name_leads_to_our_address_sees_nothing(path: str):
    """A page may have its own name lead here; the browser then takes us for that page's server."""
    with client_of(create_app(ConstantPolicy())) as client:
        refused = client.get(path, headers={"host": "evil.example"}, follow_redirects=False)
        assert refused.status_code == 421
        assert "allowed_hosts" in refused.json()["detail"]
        headers = {"host": "evil.example", "origin": "http://evil.example"}
        with pytest.raises(WebSocketDenialResponse) as denial:
            client.websocket_connect("/dashboard/feed", headers=headers).__enter__()
        assert denial.value.status_code == 421


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_probes_may_use_any_name(path: str):
    with client_of(create_app(ConstantPolicy())) as client:
        assert client.get(path, headers={"host": "pod-7.cluster"}).status_code == 200


@pytest.mark.parametrize("origin", ["http://[", "http://]", "//", "http://[::1"])
def test_an_origin_that_is_no_url_is_refused_like_any_other(origin: str):
    with client_of(create_app(ConstantPolicy())) as client:
        assert client.post("/v1/reset", headers={"origin": origin}).status_code == 403


def test_frames_that_cannot_be_read_count_like_those_that_can():
    app = create_app(ConstantPolicy(), Settings(rate_per_s=0.001))
    with client_of(app) as client:
        assert client.post("/v1/act", content=b"\xc1", headers=MSGPACK).status_code == 400
        assert client.post("/v1/act", content=packed(), headers=MSGPACK).status_code == 429


def test_a_key_that_is_gone_ends_even_the_stream_that_says_nothing(
    keys: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(access_module, "RECHECK_S", 0.0)
    monkeypatch.setattr(watches, "RECHECK_S", 0.01)
    with (
        client_of(create_app(FakePolicy(), Settings(keys_file=keys))) as client,
        client.websocket_connect("/v1/stream", headers=bearer(ARM)) as socket,
    ):
        socket.send_bytes(packed())
        assert socket.receive_bytes()
        keys.write_text('[arm-1]\nkey = "another-secret-0123"\n')
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_bytes()
        assert closed.value.code == 1008


def test_a_key_that_is_gone_ends_the_dashboards_feed(keys: Path, monkeypatch: pytest.MonkeyPatch):
    """Once whoever had held an administrator's key went on watching the camera."""
    monkeypatch.setattr(access_module, "RECHECK_S", 0.0)
    with (
        client_of(create_app(FakePolicy(), Settings(keys_file=keys))) as client,
        client.websocket_connect("/dashboard/feed") as feed,
    ):
        feed.send_json({"key": ADMIN})
        assert "overview" in feed.receive_json()
        keys.write_text(f'[arm-1]\nkey = "{ARM}"\n')
        with pytest.raises(WebSocketDisconnect) as closed:  # noqa: PT012  or what came before it
            while True:
                feed.receive_json()
        assert closed.value.code == 4401


def test_an_empty_key_file_takes_no_key_away(keys: Path):
    """It is one that is being written; once it ended every stream."""
    keys.write_text("")
    with pytest.raises(KeyFileError, match="no key.*revoked = true"):
        read_keys(keys)


def test_the_last_key_is_revoked_by_its_own_entry(keys: Path, monkeypatch: pytest.MonkeyPatch):
    """A file without it would have no key, and change nothing."""
    monkeypatch.setattr(access_module, "RECHECK_S", 0.0)
    keys.write_text(f'[arm-1]\nkey = "{ARM}"\n')
    access = Access(keys)
    caller = access.identify(f"Bearer {ARM}", "")
    keys.write_text(f'[arm-1]\nkey = "{ARM}"\nrevoked = true\n')
    with pytest.raises(MissingKeyError):
        access.identify(f"Bearer {ARM}", "")
    with pytest.raises(MissingKeyError):
        access.require_known(caller)  # nor over a connection that is open
    assert access.has_usable_keys()


def test_a_revoked_key_needs_no_digest_and_takes_no_other_away(keys: Path):
    keys.write_text(FILE + "[lost]\nrevoked = true\n")
    assert [caller.name for _, caller in read_keys(keys)] == ["arm-1", "boss"]
    keys.write_text(FILE.replace("admin = true", "revoked = false"))
    assert [caller.name for _, caller in read_keys(keys)] == ["arm-1", "boss"]
    keys.write_text('[arm-1]\nrevoked = "yes"\n')
    with pytest.raises(KeyFileError, match="revoked must be true or false, got 'yes'"):
        read_keys(keys)


def test_a_public_address_without_keys_must_be_meant(keys: Path):
    for host in ("0.0.0.0", "::", "192.0.2.1", "robots.lab.example"):
        with pytest.raises(ValidationError, match="allow_anyone"):
            Settings(host=host)
        Settings(host=host, allow_anyone=True)
        Settings(host=host, keys_file=keys)
    for host in ("127.0.0.1", "::1", "localhost"):
        Settings(host=host)


def statuses(settings: str, *forwarded_for: str) -> list[int]:
    """What a proxy on this machine hears that calls on behalf of these."""
    with serving(settings=f"rate_per_s=0.001, {settings}") as server:
        server.wait_until_ready()
        return [
            server.http.post(
                "/v1/act", content=packed(), headers={**MSGPACK, "x-forwarded-for": one}
            ).status_code
            for one in forwarded_for
        ]


def test_only_a_named_proxy_says_on_whose_behalf_it_calls():
    """Each address may send one frame; eight of eight escaped that by a header of their own."""
    assert statuses("trusted_proxies=('192.0.2.0/24',)", "10.0.0.1", "10.0.0.2") == [200, 429]
    asked = ("10.0.0.1", "10.0.0.2", "10.0.0.1", "forged, 10.0.0.2", "10.0.0.3, 127.0.0.1")
    heard = [200, 200, 429, 429, 200]
    assert statuses("trusted_proxies=('127.0.0.0/8',)", *asked) == heard
