"""What the documents say can be done, can be done: every command is checked, and most are run."""

import re
import shlex
import shutil
import subprocess
import sys

import httpx
import PIL.Image
import pytest

from deft_client import PolicyClient, control_loop
from deft_server.reproduce.local_server import local_server
from scripts.hostile_servers import dripping, frozen, holding_up, withholding
from tests.client.samples import frame
from tests.repository import ROOT, documented_commands, documents, name_of
from tests.typed import MODULES, assert_known

COMMANDS = documented_commands()
FOLDERS = "client|policies|server|draft_training|tests|scripts|docs"
DOCUMENTED_URL = "http://127.0.0.1:8000"


def of_program(*programs: str) -> list[object]:
    found = [one for one in COMMANDS if shlex.split(one.line, comments=True)[0] in programs]
    return [pytest.param(one, id=str(one)) for one in found]


@pytest.fixture(scope="module")
def url():
    with local_server("--policy", "constant") as url:
        yield url


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with the pictures that the documents speak of."""
    for name in ("image.png", "frame.png", "wrist.jpg"):
        PIL.Image.fromarray(frame(64, 64)).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_program_in_the_documents_is_known_here():
    known = {
        "make",
        "deft",
        "deft-client",
        "curl",
        "pip",
        "git",
        "cd",
        "docker",
        "python",
        "python3",
    }
    used = {shlex.split(one.line, comments=True)[0] for one in COMMANDS}
    loop = {"for", ".venv/bin/pytest", "done"}
    assert used <= known | loop | {"export", "torchrun"}, (
        "say in this file how to check the new ones"
    )
    assert {"make", "deft", "deft-client", "curl"} <= used


@pytest.mark.parametrize("command", of_program("make"))
def test_make_knows_the_target(command):
    arguments = shlex.split(command.line, comments=True)[1:]
    # Without a shell, so that nothing but make itself runs; -n prints what it would do.
    dry = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr
    defined = set(re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.M))
    assert {word.partition("=")[0] for word in arguments if "=" in word} <= defined


PASSED_ON = {"EVAL_FLAGS": ["deft-client", "eval"], "SERVE_FLAGS": ["deft", "serve"]}


def command_lines() -> list[object]:
    """What is typed for our programs, directly or through a variable of make."""
    typed = [(str(one), shlex.split(one.line, comments=True)) for one in COMMANDS]
    lines = [(name, words) for name, words in typed if words[0] in MODULES]
    for name, words in typed:
        for variable, program in PASSED_ON.items():
            flags = [word.partition("=")[2] for word in words if word.startswith(f"{variable}=")]
            lines += [(name, [*program, *shlex.split(one)]) for one in flags]
    return [pytest.param(words, id=name) for name, words in lines]


@pytest.mark.parametrize("words", command_lines())
def test_the_command_line_knows_every_flag(words):
    assert_known(words)


ASKING = [one for one in of_program("deft-client") if one.id.split()[2] in ("ping", "act")]


@pytest.mark.parametrize("command", ASKING)
def test_what_a_client_does_in_the_documents_it_does(command, url, folder):
    _, *arguments = shlex.split(command.line, comments=True)
    run = subprocess.run(
        [sys.executable, "-m", "deft_client", *arguments, "--url", url],
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", of_program("curl"))
def test_what_curl_asks_in_the_documents_is_answered(command, url, folder):
    assert DOCUMENTED_URL in command.line
    line = command.line.replace(DOCUMENTED_URL, url)
    run = subprocess.run(
        ["curl", "--fail-with-body", "-sS", *shlex.split(line)[1:]], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("command", of_program("pip"))
def test_what_pip_installs_is_here(command):
    arguments = [word for word in shlex.split(command.line)[2:] if not word.startswith("-")]
    for path in (word.partition("[")[0] for word in arguments if word.startswith(("./", "req"))):
        assert (ROOT / path).exists(), path


def test_scripts_in_the_documents_exist():
    for command in (shlex.split(one.line, comments=True) for one in COMMANDS):
        if command[:2] == ["python", "-m"]:
            module = ROOT / command[2].replace(".", "/")
            found = module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
            assert found, command
        elif command[0] in ("python", "python3"):
            assert (ROOT / command[1]).is_file(), command


def python_blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)


def test_the_robot_loop_runs_as_it_stands(url, tmp_path):
    (program,) = python_blocks("docs/robot_loop.md")
    assert len(program.splitlines()) <= 60
    script = tmp_path / "robot_loop.py"
    script.write_text(program)
    run = subprocess.run(
        [sys.executable, "-W", "error", script, url, "lift the cup", "10"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    *commands, last = run.stdout.splitlines()
    assert len(commands) == 10
    assert "move [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]" in commands
    assert last == "stop"
    assert "problem=None" in run.stderr


@pytest.mark.parametrize(
    "manner",
    [None, frozen, dripping, withholding],
    ids=["nobody", "frozen", "dripping", "withholding"],
)
def test_the_robot_loop_commands_hold_in_every_period(manner, monkeypatch):
    """Nobody at the port, a frozen server, a dripping one, an answer that is withheld."""
    (program,) = python_blocks("docs/robot_loop.md")
    quick = program.replace("period_s=0.1, watchdog_s=0.2", "period_s=0.02, watchdog_s=9.0")
    assert quick != program
    module: dict[str, object] = {"__name__": "robot_loop"}
    exec(compile(quick, "robot_loop.py", "exec"), module)
    commands = []

    class Arm(module["MyArm"]):
        def move(self, action):
            commands.append(action.tolist())

    monkeypatch.setattr(control_loop, "LAST_WORDS_S", 0.01)
    with holding_up(manner or frozen) as server:
        url = server.url if manner else "http://127.0.0.1:1"
        with PolicyClient(url) as policy:
            status = module["drive"](Arm("lift the cup"), policy, 10)
        assert not server.let_go.is_set()
    assert commands == [[0.0] * 6 + [1.0]] * 10
    assert (status.holds, status.stops, status.stalls) == (10, 0, 0)


def test_the_python_of_the_readme_runs(url):
    for program in python_blocks("README.md"):
        exec(compile(program.replace(DOCUMENTED_URL, url), "README.md", "exec"), {})


def test_the_msgpack_of_the_api_page_is_answered(url):
    (program,) = python_blocks("docs/http_api.md")
    names: dict[str, object] = {}
    exec(compile(program, "http_api.md", "exec"), names)
    reply = httpx.post(
        f"{url}/v1/act", content=names["body"], headers={"content-type": "application/msgpack"}
    )
    assert reply.status_code == 200


def test_every_file_a_document_names_exists():
    missing = []
    for path in documents():
        text = path.read_text()
        named = [ROOT / name for name in re.findall(rf"`((?:{FOLDERS})/[\w/.-]+)`", text)]
        linked = [path.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
        missing += [f"{name_of(path)}: {one}" for one in named + linked if not one.exists()]
    assert not missing
