"""`deft-client` as it is typed: what it prints, and the exit code."""

import contextlib
import http.server
import json
import threading

import PIL.Image
import pytest

from deft_client.__main__ import main
from deft_client.wire import json_codec, msgpack_codec
from tests.client.samples import frame, full_answer, saved
from tests.standins.policy_server import ANSWER, INFO, streaming


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers like a server with a policy; notes what was sent in its server's `bodies`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        known = {"/readyz": b"{}", "/v1/info": json_codec.encode_info(INFO)}
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
    assert "unrecognized arguments: --colour red" in wrong
    assert "deft-client ping --help" in remedy


def test_ping_says_what_answers_and_how_far_it_is(server, capsys):
    assert main(["ping", "--url", server.url, "--count", "2"]) == 0
    shown = capsys.readouterr().out
    for expected in ("is ready", "fake", "2 x 3", "libero_goal (default), libero_object", "ms"):
        assert expected in shown


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
    assert msgpack_codec.decode_request(body).observation.instruction == "lift the cup"


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
    message = msgpack_codec.decode_request(body)
    assert list(message.observation.cameras) == ["wrist"]
    assert message.observation.state.tolist() == [0.5, -1]
    options = message.options
    assert (options.session_id, options.statistics_key, options.decoding) == (
        "s", "libero_goal", "lossless",
    )  # fmt: skip
    assert (options.radius, options.deadline_ms, options.want_trace) == (9, 500, True)
    assert (options.want_reasoning, options.max_tokens) == (True, 320)


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
