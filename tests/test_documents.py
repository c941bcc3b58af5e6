"""The pages keep their word: links resolve, every command parses, most commands run."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path

import httpx
import pytest

from deft_client import ClientSettings, PolicyClient, Timeouts, control_loop
from deft_libero.results.store import ResultsStore
from deft_policies.tiny_libero import CHECKPOINT, STATISTICS_KEY
from deft_server.commands.serve import EXAMPLE
from scripts.local_server import local_server
from tests.client.hostile_servers import dripping, frozen, holding_up, withholding
from tests.core.samples import frame
from tests.demonstrations import write_demonstrations
from tests.libero.episodes import header
from tests.libero.episodes import record as episode
from tests.repository import ROOT, DocumentedCommand, documented_commands, documents, name_of
from tests.server.commands.test_replay import record
from tests.typed import MODULES, assert_known, main_of, next_command

URL = "http://127.0.0.1:8000"
PAGES_SCRIPT, PAGES_INDEX = (
    f"server/deft_server/dashboard/static/{name}" for name in ("docs.js", "index.html")
)
# What a command on a page asks for: of curl, of deft-client act, of a request's body.
ASKED = r"""(?:-F instruction=|deft-client act \S+ |"instruction": )["'](\w[^"']+)["']"""
COMMANDS = documented_commands()
FLAGS_OF_MAKE = {"EVAL_FLAGS": ["deft-client", "eval"], "SERVE_FLAGS": ["deft", "serve"]}
NOT_OURS = {
    "ssh-keygen",
    "ray",
    "cd",
    "docker",
    "export",
    "git",
    "torchrun",
    "for",
    "done",
    ".venv/bin/pip",
    ".venv-own/bin/pip",
    ".venv/bin/pytest",
}

NOT_RUN = "|".join(  # only parsed
    (
        r"(make|pip|ray|python3?|cd|docker|export|git|torchrun|for|done)( |$)",
        r"\.venv(-own)?/bin/(pip|pytest)( |$)",
        r"\.venv-(vla-eval|libero-pro)/bin/",
        # Never ends, takes hours in the simulator, measures the machine, or needs weights.
        r"deft (serve|plan|reproduce)|deft train (policy|correct)",
        r"deft-client (demos|assets|compare|eval (libero|--plan))",
        # Needs an environment with a model's own code, or a report of one.
        r"deft doctor .*--(against|check-report)|ssh-keygen",
        r".*openvla-7b",
    )
)
QUICK = {
    "deft train fit": "--set steps=2 --set batch_size=2 --set optimizer.warm_up_steps=1",
    "deft train evaluate": "--radii 0",
    "deft bench": "--frames 2 --warm-ups 0",
    "deft doctor": "--port 0",
    "deft-client eval point_world": "--episodes 1",
    "deft-client load": "--deadline-ms 60000",  # a busy machine answers late
}
SAYS_WHAT_IS_NEXT = "deft (bench|replay|index|convert|train)|deft-client (eval|datasets export)"
OWN = {  # what stands for something of the reader's
    r"(--recording|--demonstration|show|replay|index|record|live|evaluate) (DATA|DIR)": r"\1 data",
    r"--draft-head DIR": f"--draft-head {CHECKPOINT.parent / 'eagle'}",
    r"--checkpoint \S+": f"--checkpoint {CHECKPOINT}",
    r"--statistics-key KEY": f"--statistics-key {STATISTICS_KEY}",
    r"--layers \S+": "--layers 3,6,9",  # a small model has fewer
}


def python_blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def url():
    with local_server("--policy", "constant") as url:
        yield url


@pytest.fixture
def readers_directory(tmp_path, monkeypatch):
    write_demonstrations(tmp_path / "data")
    record(tmp_path / "recordings", frame(8, 8)[0, 0, :1].astype(float).repeat(7))
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "frame.png", tmp_path / "examples")
    store = ResultsStore(tmp_path / "results" / "run", header())
    store.append(episode())
    store.close()
    monkeypatch.chdir(tmp_path)


def test_every_file_a_document_names_exists():
    folders = "client|policies|server|draft_training|tests|scripts|docs"
    missing = []
    for path in documents():
        text = path.read_text()
        named = [ROOT / name for name in re.findall(rf"`((?:{folders})/[\w/.-]+)`", text)]
        linked = [path.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
        missing += [f"{name_of(path)}: {one}" for one in named + linked if not one.exists()]
    assert not missing


def test_the_functions_on_a_frames_way_are_in_their_files():
    rows = re.findall(
        r"^\| \d+ \| `([^`]+)` \| `(\w+)` \|", (ROOT / "docs/architecture.md").read_text(), re.M
    )
    assert rows
    for file, function in rows:
        assert re.search(rf"(def|class) {function}\b", (ROOT / file).read_text()), (file, function)


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS), ids=str)
def test_every_command_is_one_that_exists(command: DocumentedCommand):
    words = shlex.split(command.line, comments=True)
    match words:
        case ["make", *arguments]:
            # Without a shell, so that nothing but make itself runs; -n prints what it would do.
            dry = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True)
            assert dry.returncode == 0, dry.stderr
            given = dict(word.split("=", 1) for word in arguments if "=" in word)
            assert given.keys() <= set(
                re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.M)
            )
            for name in given.keys() & FLAGS_OF_MAKE.keys():
                assert_known([*FLAGS_OF_MAKE[name], *shlex.split(given[name])])
        case [program, *_] if program in MODULES:
            assert_known(words)
        case ["python", "-m", module, *_]:
            is_recipe = module.startswith("tiny_libero_recipe")
            path = (ROOT / "scripts/tiny_libero" if is_recipe else ROOT) / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
            if (path / "__main__.py").is_file() and signature(main_of(module)).parameters:
                assert_known(words)
        case ["python3", "-m", "venv", folder]:
            assert f"{folder}/bin/" in (ROOT / command.document).read_text()
        case [program, *_] if program.startswith(".venv-libero-pro/bin/"):
            if (name := program.rpartition("/")[2]) in MODULES:
                assert_known([name, *words[1:]])
        case [program, *arguments] if program.startswith(".venv-vla-eval/bin/"):
            configs = arguments[arguments.index("--config") + 1 :] if "--config" in words else []
            assert all((ROOT / one).is_file() for one in configs[:1])
        case ["python" | "python3", script, *_]:
            assert (ROOT / script).is_file()
        case ["pip", "install", *arguments]:
            for word in arguments:
                assert not word.startswith(("./", "req")) or (ROOT / word.split("[")[0]).exists()
        case ["curl", *_]:
            assert URL in command.line
        case _:
            assert words[0] in NOT_OURS, "say in this file how to check it"


def typed(command: DocumentedCommand, url: str) -> list[str]:
    """The words of a command, with what is the reader's filled in."""
    line = command.line.partition(" #")[0].replace(URL, url)
    for mine, ours in OWN.items():
        line = re.sub(mine, ours, line)
    if re.match("deft-client (ping|act)", line):
        line += f" --url {url}"
    quick = next((more for begins, more in QUICK.items() if line.startswith(begins)), "")
    return shlex.split(f"{line} {quick}")


RUN = [one for one in COMMANDS if not re.match(NOT_RUN, one.line)]


@pytest.mark.parametrize("document", sorted({one.document for one in RUN}))
def test_what_a_document_says_can_be_typed_in_its_order(document, url, readers_directory, capsys):
    if document == "docs/datasets.md":
        pytest.importorskip("pyarrow", reason="pip install 'deft-client[datasets]'")
    for command in (one for one in RUN if one.document == document):
        program, *arguments = typed(command, url)
        if program == "curl":
            if shutil.which("curl"):
                subprocess.run(["curl", "--fail-with-body", "-sS", *arguments], check=True)
            continue
        code = main_of(program)(arguments)
        said = capsys.readouterr()
        assert code == 0, f"{command}\n{said.err}"
        if re.match(SAYS_WHAT_IS_NEXT, command.line):
            next_command(said.out)


def test_the_robot_loop_runs_as_it_stands(url, tmp_path: Path):
    (program,) = python_blocks("docs/robot_loop.md")
    script = tmp_path / "robot_loop.py"
    script.write_text(program)
    command = [sys.executable, "-W", "error", str(script), url, "lift the cup"]
    for steps in (10, 100, 600):  # more, until an answer came in time: a busy machine answers late
        run = subprocess.run([*command, str(steps)], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        *commands, last = run.stdout.splitlines()
        if f"move {[0.0] * 7}" in commands and "problem=None" in run.stderr:
            break
    assert sum(one.startswith("move") for one in commands) == steps  # a stalled machine is stopped
    assert f"move {[0.0] * 7}" in commands
    assert last == "stop"
    assert "problem=None" in run.stderr


@pytest.mark.parametrize("manner", [None, frozen, dripping, withholding])
def test_the_robot_loop_commands_hold_in_every_period(manner, monkeypatch):
    (program,) = python_blocks("docs/robot_loop.md")
    module: dict[str, object] = {"__name__": "robot_loop"}
    exec(compile(program, "robot_loop.py", "exec"), module)
    module["SETTINGS"] = replace(module["SETTINGS"], period_s=0.02, watchdog_s=9.0)
    monkeypatch.setattr(control_loop, "LAST_WORDS_S", 0.01)
    hasty, commands = ClientSettings(timeouts=Timeouts(answer_s=0.5)), []

    class Arm(module["MyArm"]):
        def move(self, action):
            commands.append(action.tolist())

    with holding_up(manner or frozen) as server:
        url = server.url if manner else "http://127.0.0.1:1"
        with PolicyClient(url, hasty) as policy:
            status = module["drive"](Arm("lift the cup"), policy, 10)
        assert not server.let_go.is_set()
    assert commands == [[0.0] * 6 + [1.0]] * 10
    assert (status.holds, status.stops, status.stalls) == (10, 0, 0)


@pytest.mark.parametrize("document", [name_of(path) for path in documents()])
def test_what_python_on_a_page_imports_of_ours_is_there(document):
    for program in python_blocks(document):
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("deft_"):
                for name in node.names:
                    assert hasattr(import_module(node.module), name.name), ast.unparse(node)


def test_the_python_of_the_readme_runs(url):
    for program in python_blocks("README.md"):
        exec(compile(program.replace(URL, url), "README.md", "exec"), {})


def test_the_msgpack_of_the_api_page_is_answered(url):
    (program,) = python_blocks("docs/http_api.md")
    names: dict[str, object] = {}
    exec(compile(program, "http_api.md", "exec"), names)
    reply = httpx.post(
        f"{url}/v1/act", content=names["body"], headers={"content-type": "application/msgpack"}
    )
    assert reply.status_code == 200


def test_documented_sentences_are_known_to_the_shipped_policy():
    assert (ROOT / "examples" / "frame.png").read_bytes() == EXAMPLE.read_bytes()
    taught = json.loads((CHECKPOINT / "training.json").read_text())["instructions"]
    pages = [(ROOT / name).read_text() for name in (*documents(), PAGES_SCRIPT, PAGES_INDEX)]
    asked = [one for page in pages for one in re.findall(ASKED, page)]
    assert len(asked) > 6
    assert set(asked) <= set(taught)
