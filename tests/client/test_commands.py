"""`deft-client` as it is typed: what it prints, and the exit code."""

import contextlib
import http.server
import json
import re
import threading
from dataclasses import replace

import PIL.Image
import pytest

from deft_client import calls
from deft_client.__main__ import main
from deft_client.commands import ping
from deft_client.commands.frames import usual_options
from deft_core.errors import Problem
from deft_core.recordings import UNRECORDED
from deft_core.wire import codec
from tests.core.samples import frame, full_answer, saved
from tests.standins.policy_server import ANSWER, INFO, streaming


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers like a server with a policy; notes what was sent in its server's `bodies`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        known = {"/readyz": b"{}", "/v1/info": codec.encode_info(INFO)}
        if self.server.num_unready:
            self.server.num_unready -= 1
            problem = Problem(503, "Not ready", "the policy is loading")
            self._answer(503, codec.encode_problem(problem))
        else:
            self._answer(200, known[self.path])

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append((self.headers, body))
        self._answer(200, ANSWER)

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as one:
        one.requests = []
        one.num_unready = 0
        one.url = f"http://127.0.0.1:{one.server_port}"
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield one
        one.shutdown()
        thread.join()


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(saved(PIL.Image.fromarray(frame()), "PNG"))
    return str(path)


def test_help_lists_the_commands(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "ping" in shown
    assert "act" in shown


def test_an_unknown_command_is_a_usage_error(capsys):
    assert main(["dance"]) == 2
    assert "unknown command 'dance'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["pingg"], "ping"), (["act", "a.png", "x", "--encodng", "png"], "--encoding")],
)
def test_what_was_probably_meant_is_named(words, meant, capsys):
    with contextlib.suppress(SystemExit):
        assert main(words) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_the_version_is_the_installed_one(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("deft-client ")


def test_a_wrong_flag_is_answered_in_two_lines(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["ping", "--colour", "red"])
    assert ended.value.code == 2
    wrong, remedy = capsys.readouterr().err.splitlines()
    assert "unrecognized arguments: --colour" in wrong
    assert "deft-client ping --help" in remedy


def test_ping_says_what_answers_and_how_far_it_is(server, capsys):
    assert main(["ping", "--url", server.url, "--count", "2"]) == 0
    shown = capsys.readouterr().out
    for expected in ("is ready", "fake", "2 x 3", "libero_goal (default), libero_object", "ms"):
        assert expected in shown


def test_ping_sends_frames_and_says_which_rate_their_answers_allow(server, capsys):
    """It once timed an empty round trip, and a loop was sized by that."""
    assert main(["ping", server.url, "--count", "3"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^answer       [\d.]+ ms p50, [\d.]+ ms p95 of 3 frames$", shown, re.M)
    rates = r"^control      up to [\d.]+ Hz; up to [\d.]+ Hz with chunks of 2"
    assert re.search(rates, shown, re.M)
    sent = [codec.decode_request(body) for _, body in server.requests]
    assert len(sent) == 4
    assert sent[0].observation.image.shape == (INFO.image_height, INFO.image_width, 3)
    assert {one.options.statistics_key for one in sent} == {None}  # the server's default


def test_frames_of_commands_name_statistics_where_the_server_has_no_default():
    assert usual_options(INFO).statistics_key is None
    without = replace(INFO, default_statistics_key=None)
    assert usual_options(without).statistics_key == INFO.statistics_keys[0]
    assert usual_options(replace(without, statistics_keys=())).statistics_key is None


def test_ping_uses_sessions_that_no_server_records(server):
    assert main(["ping", server.url, "--count", "1"]) == 0
    sessions = {codec.decode_request(body).options.session_id for _, body in server.requests}
    (session_id,) = sessions
    assert session_id.startswith(UNRECORDED)


@pytest.mark.parametrize(
    ("answers_ms", "chunk_length", "said"),
    [
        ([50.0] * 20, 1, "control      up to 18.2 Hz\n"),
        (
            [50.0] * 20,
            8,
            "up to 18.2 Hz; up to 133.0 Hz with chunks of 8 and ChunkBlending.SWITCH\n",
        ),
        (
            [546.0] * 20,
            1,
            "LoopSettings(period_s=0.575, watchdog_s=1.4375, "
            "options=ActOptions(deadline_ms=1150))\n",
        ),
        ([10.0] * 18 + [100.0] * 2, 1, "answer       10.0 ms p50, 100.0 ms p95 of 20 frames\n"),
    ],
)
def test_the_rate_follows_from_the_p95(answers_ms, chunk_length, said):
    assert said in ping._answers_text(answers_ms, replace(INFO, chunk_length=chunk_length))


def test_ping_without_frames_measures_round_trips_alone(server, capsys):
    assert main(["ping", server.url, "--count", "0"]) == 0
    assert "answer " not in capsys.readouterr().out
    assert not server.requests


def test_ping_waits_for_a_server_that_is_loading_where_it_is_asked_to(server, capsys, monkeypatch):
    monkeypatch.setattr(calls, "PROBE_S", 0.01)
    server.num_unready = 3
    assert main(["ping", server.url, "--count", "0"]) == 1
    assert "the policy is loading" in capsys.readouterr().err
    assert main(["ping", server.url, "--count", "0", "--wait"]) == 0
    assert "is ready" in capsys.readouterr().out
    server.num_unready = 10**6
    assert main(["ping", server.url, "--count", "0", "--wait", "0.05"]) == 1


@pytest.mark.parametrize("place", [1, 3, 4])
def test_a_url_may_follow_a_flag_whose_value_may_be_left_out(place, server, capsys):
    """`ping --wait URL` took the URL for the seconds."""
    words = ["ping", "--count", "0", "--wait"]
    words.insert(place, server.url)
    assert main(words) == 0
    assert f"{server.url} is ready" in capsys.readouterr().out


@pytest.mark.parametrize("place", [2, 4, 5])
def test_a_url_is_a_word_behind_the_others_at_any_place(place, server, picture, capsys):
    words = [picture, "lift the cup", "--state", "1,2", "--trace"]
    words.insert(place, server.url)
    assert main(["act", *words]) == 0
    assert "action 0" in capsys.readouterr().out
    assert main(["act", *words, "--url", server.url]) == 0


def test_two_urls_are_refused(server, picture, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["ping", server.url, "--url", "http://robot:8000"])
    assert ended.value.code == 2
    assert f"got {server.url} and http://robot:8000" in capsys.readouterr().err


def test_ping_without_a_server_is_one_line_and_code_1(capsys):
    with streaming() as stream:
        url = stream.url
    assert main(["ping", "--url", url]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "server running" in error


def test_act_prints_the_actions_and_the_time_they_took(server, picture, capsys):
    assert main(["act", picture, "lift the cup", "--url", server.url]) == 0
    shown = capsys.readouterr().out
    assert "action 0:  +0.10000  -0.20000  +3.14159" in shown
    assert "round_trip_ms" in shown
    assert "intervened: clamp" in shown
    (_, body) = server.requests[0]
    assert codec.decode_request(body).observation.instruction == "lift the cup"


def test_act_sends_everything_it_is_given(server, picture, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DEFT_API_KEY", "from the environment")
    key = tmp_path / "key"
    key.write_text("secret\n")
    given = ["--camera", f"wrist={picture}", "--state", "0.5,-1", "--statistics-key", "libero_goal"]
    given += ["--decoding", "lossless", "--radius", "9", "--deadline-ms", "500", "--session", "s"]
    given += ["--encoding", "png", "--trace", "--api-key-file", str(key)]
    given += ["--reasoning", "--max-tokens", "320"]
    assert main(["act", picture, "lift the cup", "--url", server.url, *given]) == 0
    shown = capsys.readouterr().out
    assert "lossless in 1 passes" in shown
    assert shown.startswith("TASK: Lift it.\naction 0: ")
    headers, body = server.requests[0]
    assert headers["authorization"] == "Bearer secret"
    message = codec.decode_request(body)
    assert list(message.observation.cameras) == ["wrist"]
    assert message.observation.state.tolist() == [0.5, -1]
    options = message.options
    assert (options.session_id, options.statistics_key, options.decoding) == (
        "s", "libero_goal", "lossless",
    )  # fmt: skip
    assert (options.radius, options.deadline_ms, options.want_trace) == (9, 500, True)
    assert (options.want_reasoning, options.max_tokens) == (True, 320)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("plain", "autoregressive"),
        ("plain:plans=plain", "autoregressive:plans=plain"),
        ("lossless", "lossless"),
        ("plainly", "plainly"),
        ("{folder}/mine.toml", "autoregressive:radius=3"),
    ],
)
def test_plain_is_a_name_for_plain_decoding(given, sent, server, picture, tmp_path):
    """Tables call it so; servers of earlier versions know the other name alone."""
    (tmp_path / "mine.toml").write_text('method = "plain"\nradius = 3\n')
    given = given.format(folder=tmp_path)
    assert main(["act", picture, "lift the cup", server.url, "--decoding", given]) == 0
    assert codec.decode_request(server.requests[0][1]).options.decoding == sent


def test_act_prints_json_that_programs_can_read(server, picture, capsys):
    assert main(["act", picture, "lift the cup", "--url", server.url, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["actions"] == full_answer().actions.tolist()


def test_act_over_the_websocket(picture, capsys):
    with streaming() as stream:
        assert main(["act", picture, "lift the cup", "--url", stream.url, "--stream"]) == 0
    assert "action 1" in capsys.readouterr().out
    assert stream.connections == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["missing.png", "lift"], "read the picture"),
        ([__file__, "lift"], "PNG"),
        (["{picture}", "lift", "--state", "one"], "--state"),
        (["{picture}", "lift", "--state", "nan"], "--state"),
        (["{picture}", "lift", "--camera", "wrist"], "NAME=FILE"),
        (["{picture}", "lift", "--timeout", "0"], "above 0"),
        (["{picture}", "lift", "--url", "robot:8000"], "start with http"),
        (["{picture}", "lift", "--api-key-file", "missing"], "API key"),
    ],
)
def test_what_cannot_be_asked_is_one_line_and_code_2(arguments, complaint, picture, capsys):
    filled = [argument.format(picture=picture) for argument in arguments]
    assert main(["act", *filled]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
