"""The dashboard's pages and feed, as a browser without a screen sees them."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketTestSession
from starlette.websockets import WebSocketDisconnect

from deft_core.types import ActOptions, Image, Observation
from deft_core.wire import codec
from deft_core.wire.formats import WireFormat
from deft_core.wire.messages import ActMessage
from deft_server.app import DeftApp, create_app
from deft_server.dashboard import pages
from deft_server.dashboard.history import MAX_SESSIONS, History
from deft_server.dashboard.pages import MAX_VIEWERS, TOO_MANY, WRONG_KEY, Feed
from deft_server.http import watches
from deft_server.recording.files import EpisodeFiles
from deft_server.settings import Settings
from tests.server.dashboard.talkative import TalkativePolicy
from tests.server.dashboard.test_history import finished
from tests.server.running import client_of

ADMIN_KEY = "a-key-of-the-administrator"
ROBOT_KEY = "a-key-of-some-robot-arm"


def build_app(settings: Settings | None = None) -> DeftApp:
    return create_app(TalkativePolicy(), settings or Settings())


@pytest.fixture
def client() -> Iterator[TestClient]:
    with client_of(build_app()) as client:
        yield client


def act(
    client: TestClient, session_id: str = "arm", headers: dict[str, str] | None = None
) -> httpx2.Response:
    image = np.full((32, 32, 3), 90, np.uint8)
    frame = Observation(image, "lift the cup", {"wrist": image})
    message = ActMessage(frame, ActOptions(session_id=session_id))
    return client.post(
        "/v1/act",
        content=codec.encode_request(message),
        headers={"content-type": WireFormat.MSGPACK.value, **(headers or {})},
    )


def news(socket: WebSocketTestSession, wanted: str) -> dict[str, object]:
    """Return the first news that hold something."""
    for _ in range(20):
        told = json.loads(socket.receive_text())
        if told.get(wanted):
            assert isinstance(told, dict)
            return told
    raise AssertionError(f"no {wanted} among the news")


def test_every_file_a_page_names_is_served_with_its_type(client: TestClient) -> None:
    seen = set()
    waiting = ["/dashboard", "/docs"]
    while waiting:
        path = waiting.pop()
        response = client.get(path)
        assert response.status_code == 200, path
        seen.add(path)
        named = re.findall(r'(?:src|href)="(/dashboard/static/[^"]+)"', response.text)
        named += [
            f"/dashboard/static/{one}" for one in re.findall(r'from "\./(\S+)"', response.text)
        ]
        waiting += [one for one in named if one not in seen]
    types = {Path(path).suffix: client.get(path).headers["content-type"] for path in seen}
    assert types[".js"].startswith("text/javascript")
    assert types[".css"].startswith("text/css")
    assert len(seen) > 12


def test_pages_load_nothing_from_elsewhere(client: TestClient) -> None:
    for path in ("/dashboard", "/docs"):
        response = client.get(path)
        assert not re.findall(r'(?:src|href)="(?:https?:)?//', response.text)
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert "<script>" not in response.text
        assert "style=" not in response.text


def test_the_bare_address_leads_to_the_dashboard_without_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[boss]\nkey = "a-key-of-the-administrator"\nadmin = true\n')
    with client_of(build_app(Settings(keys_file=keys))) as client:
        assert (
            client.get("/", headers={"accept": "text/html"}, follow_redirects=False).headers[
                "location"
            ]
            == "/dashboard"
        )
        assert client.get("/docs").status_code == 200


@pytest.mark.parametrize("name", ["none.js", "..%2f..%2fserve.py"])
def test_an_unknown_asset_is_not_found(client: TestClient, name: str) -> None:
    response = client.get(f"/dashboard/static/{name}", follow_redirects=False)
    assert response.status_code == 404


def test_traces_are_wanted_only_while_a_dashboard_is_open(client: TestClient) -> None:
    service = client.app.service  # type: ignore[attr-defined]
    assert not service.events.wants_traces
    with client.websocket_connect("/dashboard/feed") as socket:
        socket.send_text("{}")
        news(socket, "overview")
        assert service.events.wants_traces
    act(client)
    assert not service.events.wants_traces


def test_without_a_dashboard_nothing_listens() -> None:
    assert not build_app(Settings(dashboard=False)).service.events.has_listeners


def test_a_dashboard_opened_after_an_incident_shows_what_was(client: TestClient) -> None:
    """It was blank: 'since this page was opened'."""
    act(client, session_id="arm-9")
    client.post("/v1/reset", json={"session_id": "arm-9"})
    with client.websocket_connect("/dashboard/feed") as socket:
        socket.send_text(json.dumps({"watch": "anonymous/arm-9"}))
        first = json.loads(socket.receive_text())
    (ended,) = [one for one in first["sessions"] if one["session_id"] == "arm-9"]
    assert ended["ended_s"] >= 0
    assert ended["thumbnail"].startswith("data:image/jpeg")
    assert first["watched"]["frames"][""].startswith("data:image/jpeg")
    assert len(first["watched"]["points"]) == 1
    assert sum(answers for _, answers, _, _ in first["timeline"]) >= 1


def test_the_timeline_is_sent_when_seconds_have_passed_and_not_with_every_frame() -> None:
    now_s = [100.0]
    feed = Feed(build_app().service, lambda: now_s[0])
    feed.history.note(finished("arm"), now_s[0])
    first = feed.timeline()
    assert first == [[0.0, 1, 0, 10.0]]
    now_s[0] += 1.0
    assert feed.timeline() is first
    now_s[0] += 5.0
    assert feed.timeline() == [[6.0, 1, 0, 10.0]]


def test_a_viewer_sees_the_frame_the_action_and_the_trace(client: TestClient) -> None:
    with client.websocket_connect("/dashboard/feed") as socket:
        socket.send_text(json.dumps({"watch": None}))
        news(socket, "overview")
        act(client)
        watched = news(socket, "watched")["watched"]
        assert isinstance(watched, dict)
        assert watched["instruction"] == "lift the cup"
        assert list(watched["frames"]) == ["", "wrist"]
        assert all(one.startswith("data:image/jpeg;base64,") for one in watched["frames"].values())
        assert len(watched["points"][0]["action"]) == 7
        assert watched["trace"]["passes"][0]["is_prefill"]
        assert watched["restart"]
        act(client)
        again = news(socket, "watched")["watched"]
        assert isinstance(again, dict)
        assert [point["number"] for point in again.get("points", [])] in ([2], [])


def test_a_page_follows_who_is_alive_until_somebody_chooses() -> None:
    now = [0.0]
    feed = Feed(build_app().service, lambda: now[0])
    viewer = feed.enter()

    async def watched() -> object:
        told = await viewer.update()
        return told and told.get("watched") and told["watched"]["key"]  # type: ignore[index]

    async def look() -> None:
        feed.history.note(finished("one"), now[0])
        assert await watched() == "lab/one"
        now[0] = 10.0
        feed.history.note(finished("two"), now[0])
        assert await watched() == "lab/two"
        viewer.watch("lab/one")
        now[0] = 20.0
        assert await watched() == "lab/one"

    asyncio.run(look())
    feed.leave()


def test_viewers_share_figures_and_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(build_app().service, lambda: 1.0)
    viewers = [feed.enter() for _ in range(MAX_VIEWERS)]
    made: list[str] = []
    make_figures, make_urls = History.overview, pages._data_urls

    def overview(history: History, now_s: float) -> dict[str, float]:
        made.append("figures")
        return make_figures(history, now_s)

    def data_urls(pictures: dict[str, Image], side: int) -> dict[str, str]:
        made.append(f"pictures {side}")
        return make_urls(pictures, side)

    monkeypatch.setattr(History, "overview", overview)
    monkeypatch.setattr(pages, "_data_urls", data_urls)

    async def look() -> None:
        feed.history.note(finished("one"), 1.0)
        told = await asyncio.gather(*(viewer.update() for viewer in viewers))
        assert all(one and one["overview"] and one["watched"] for one in told)

    asyncio.run(look())
    assert sorted(made) == ["figures", "pictures 384", "pictures 64"]


def test_a_session_that_begins_anew_is_shown_from_its_beginning() -> None:
    feed = Feed(build_app().service, lambda: 1.0)
    viewer = feed.enter()

    async def numbers() -> object:
        told = await viewer.update()
        assert told
        return [one["number"] for one in told["watched"]["points"]]  # type: ignore[index]

    async def look() -> None:
        for number in range(3):
            feed.history.note(finished("one"), number / 10)
        assert await numbers() == [1, 2, 3]
        for number in range(MAX_SESSIONS):
            feed.history.note(finished(f"other-{number}"), 1.0)
        feed.history.note(finished("one"), 1.0)
        viewer.watch("lab/one")
        assert await numbers() == [1]

    asyncio.run(look())


def test_a_robot_does_not_get_the_trace_it_did_not_ask_for(client: TestClient) -> None:
    with client.websocket_connect("/dashboard/feed") as socket:
        socket.send_text("{}")
        news(socket, "overview")
        assert codec.decode_answer(act(client).content).trace is None


def test_a_viewer_may_watch_another_session(client: TestClient) -> None:
    with client.websocket_connect("/dashboard/feed") as socket:
        socket.send_text("{}")
        news(socket, "overview")
        act(client, "one")
        act(client, "two")
        socket.send_text(json.dumps({"watch": "anonymous/two"}))
        for _ in range(20):
            watched = json.loads(socket.receive_text()).get("watched")
            if watched and watched["key"] == "anonymous/two":
                break
        assert watched["restart"]
        sessions = news(socket, "sessions")["sessions"]
        assert isinstance(sessions, list)
        assert [one["name"] for one in sessions] == ["one", "two"]


@pytest.mark.parametrize("said", ["", "nonsense", "[]", "[" * 5000, '{"watch": 5, "key": 7}'])
def test_a_page_that_says_nonsense_is_fed_all_the_same(client: TestClient, said: str) -> None:
    with client.websocket_connect("/dashboard/feed") as socket:
        socket.send_text(said)
        assert news(socket, "overview")


def test_one_viewer_too_many_is_turned_away(client: TestClient) -> None:
    sockets = [client.websocket_connect("/dashboard/feed") for _ in range(MAX_VIEWERS + 1)]
    opened = [socket.__enter__() for socket in sockets]
    for socket in opened:
        socket.send_text("{}")
    for socket in opened[:-1]:
        news(socket, "overview")
    with pytest.raises(WebSocketDisconnect) as closed:
        opened[-1].receive_text()
    assert closed.value.code == TOO_MANY
    for socket in sockets:
        socket.__exit__(None, None, None)


def keyed_app(tmp_path: Path) -> DeftApp:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[boss]\nkey = "{ADMIN_KEY}"\nadmin = true\n[arm]\nkey = "{ROBOT_KEY}"\n')
    return build_app(Settings(keys_file=keys))


def test_with_keys_the_pages_are_open_and_the_feed_is_not(tmp_path: Path) -> None:
    with client_of(keyed_app(tmp_path)) as client:
        assert client.get("/dashboard").status_code == 200
        for key in ("", "wrong", ROBOT_KEY):
            with client.websocket_connect("/dashboard/feed") as socket:
                socket.send_text(json.dumps({"key": key}))
                with pytest.raises(WebSocketDisconnect) as closed:
                    socket.receive_text()
            assert closed.value.code == WRONG_KEY
        with client.websocket_connect("/dashboard/feed") as socket:
            socket.send_text(json.dumps({"key": ADMIN_KEY}))
            assert news(socket, "overview")


def test_with_keys_the_feed_outlives_the_looks_at_the_key_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection has no key of its own: the page sends it in its first message."""
    monkeypatch.setattr(watches, "RECHECK_S", 0.01)
    with (
        client_of(keyed_app(tmp_path)) as client,
        client.websocket_connect("/dashboard/feed") as socket,
    ):
        socket.send_text(json.dumps({"key": ADMIN_KEY}))
        for _ in range(5):
            assert news(socket, "overview")


def test_a_page_of_another_site_cannot_open_the_feed(client: TestClient) -> None:
    headers = {"origin": "https://elsewhere.example"}
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/dashboard/feed", headers=headers) as socket,
    ):
        socket.receive_text()


def test_the_dashboard_can_be_switched_off() -> None:
    with client_of(build_app(Settings(dashboard=False))) as client:
        assert client.get("/dashboard").status_code == 404
        assert (
            client.get("/", headers={"accept": "text/html"}, follow_redirects=False).headers[
                "location"
            ]
            == "/docs"
        )
        assert client.get("/docs").status_code == 200


def test_without_keys_recording_is_switched_on_the_servers_own_machine(tmp_path: Path) -> None:
    """It took a key, so that a recording that a full disk had ended stayed off."""
    path = "/v1/admin/recording"
    settings = Settings(record=tmp_path / "out", record_min_free_bytes=0)
    with client_of(build_app(settings), client=("127.0.0.1", 1)) as client:
        for wanted in (False, True):
            assert client.post(path, json={"on": wanted}).json()["is_on"] is wanted
        there = {"origin": "http://elsewhere.example"}
        assert client.post(path, json={"on": False}, headers=there).status_code == 403
        for name in ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"):
            proxied = client.post(path, json={"on": False}, headers={name: "10.0.0.9"})
            assert proxied.status_code == 403, name
        assert client.get(path).json()["is_on"] is True


@pytest.mark.parametrize(
    ("address", "changes"),
    [
        ("10.0.0.9", {}),
        ("127.0.0.1", {"host": "0.0.0.0", "allow_anyone": True}),
        ("127.0.0.1", {"trusted_proxies": ("127.0.0.1",)}),
    ],
)
def test_without_keys_nobody_is_an_administrator_where_others_reach_the_server(
    address: str, changes: dict[str, Any]
) -> None:
    with client_of(build_app(Settings(**changes)), client=(address, 1)) as client:
        assert client.get("/v1/admin/recording").status_code == 403


def test_a_recording_that_cannot_be_switched_on_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    settings = Settings(record=folder, record_min_free_bytes=0)
    path = "/v1/admin/recording"
    with client_of(build_app(settings), client=("127.0.0.1", 1)) as client:
        client.post(path, json={"on": False})
        with EpisodeFiles(folder)._lock:
            refused = client.post(path, json={"on": True})
    assert refused.status_code == 422
    assert "another server records here" in refused.json()["detail"]


def test_recording_is_switched_by_an_administrator_only(tmp_path: Path) -> None:
    app = keyed_app(tmp_path)
    with client_of(app) as client:
        path, robot = "/v1/admin/recording", {"authorization": f"Bearer {ROBOT_KEY}"}
        boss = {"authorization": f"Bearer {ADMIN_KEY}"}
        assert client.post(path, json={"on": True}).status_code == 401
        assert client.post(path, json={"on": True}, headers=robot).status_code == 403
        assert client.post(path, json={"on": True}, headers=boss).status_code == 422
        assert client.get(path, headers=boss).json()["is_on"] is False


def test_a_server_told_to_record_records_from_the_start(tmp_path: Path) -> None:
    keys = keyed_app(tmp_path).service.settings.keys_file
    settings = Settings(keys_file=keys, record=tmp_path / "out", record_min_free_bytes=0)
    boss = {"authorization": f"Bearer {ADMIN_KEY}"}
    with client_of(build_app(settings)) as client:
        assert client.get("/v1/admin/recording", headers=boss).json()["is_on"] is True
        act(client, headers=boss)
        off = client.post("/v1/admin/recording", json={"on": False}, headers=boss).json()
        assert (off["is_on"], off["steps"]) == (False, 1)
        for body in ("{", "[]", '{"on": 1}'):
            told = client.post("/v1/admin/recording", content=body, headers=boss)
            assert told.status_code in (400, 422)
        on = client.post("/v1/admin/recording", json={"on": True}, headers=boss).json()
        assert on["is_on"] is True
        act(client, headers=boss)
    assert len(list((tmp_path / "out").rglob("*.deftrec"))) == 2


def test_a_full_disk_stops_the_recording_and_not_the_serving(tmp_path: Path) -> None:
    settings = Settings(record=tmp_path / "out", record_min_free_bytes=10**18)
    with client_of(build_app(settings)) as client:
        for _ in range(3):
            assert act(client).status_code == 200
        for _ in range(200):
            page = client.get("/metrics").text
            if "deft_recording 0.0" in page:
                break
        assert "deft_recording 0.0" in page
        assert 'deft_recording_stops_total{reason="no room"} 1.0' in page
        assert act(client).status_code == 200
