"""The commands of the documents, typed in their order in a directory like the reader's.

What stands for something of the reader's is replaced by the policy that ships and by a few frames;
training is cut to two steps. `NOT_RUN` names the rest and says why.
"""

import re
import shlex
from pathlib import Path

import PIL.Image
import pytest

from deft_client.libero.results.store import ResultsStore
from deft_policies.tiny_libero import CHECKPOINT, STATISTICS_KEY
from tests.client.libero.episodes import header
from tests.client.libero.episodes import record as episode
from tests.client.samples import frame
from tests.draft_training.made_up import write_demonstrations
from tests.repository import DocumentedCommand, documented_commands
from tests.server.commands.test_replay import record
from tests.typed import main_of, next_command

NOT_RUN = {
    r"make ": "installs, or runs everything there is; test_documents.py asks make what it would do",
    r"pip ": "needs the network; .ci/release installs in clean environments",
    r"docker ": "needs docker; tests/server/test_deploy.py reads its file",
    r"deft serve": "never ends; tests/first_hours.py and tests/server serve with these flags",
    r"deft-client (demos|assets|eval libero)|deft train (policy|correct)": "hours in the "
    "simulator; tests/client/libero and tests/draft_training play small ones",
    r"python -m scripts|deft plan": "measures this machine or attacks it, and answers by "
    "what it found; tests/server/planning/test_plan.py plans with made-up times",
    r"deft reproduce|deft-client compare": "an hour of episodes; tests/server/reproduce plays "
    "small ones",
    r".*openvla-7b": "weights that are not here",
    r"torchrun ": "several GPUs; tests/draft_training starts two processes on a CPU",
    r"for |done|\.venv/bin/pytest": "the tests with twenty seeds",
}
ELSEWHERE = (
    # test_documents.py runs or checks them, tests/examples drives the node.
    r"curl |deft-client (ping|act)|cd |git |export |python3 examples/"
)
QUICK = {
    "deft train fit": "--set steps=2 --set batch_size=2 --set optimizer.warm_up_steps=1",
    "deft train evaluate": "--radii 0",
    "deft bench": "--frames 2 --warm-ups 0",
    "deft doctor": "--port 0",
    "deft-client eval point_world": "--episodes 1",
}
LONG = (  # what ends with the next command to type
    "deft (bench|replay|index|convert|train)|deft-client (eval|datasets export)"
)
OWN = {  # what stands for something of the reader's
    r"(--recording|--demonstration|show|replay|index|record|live|evaluate) (DATA|DIR)": r"\1 data",
    r"--draft-head DIR": f"--draft-head {CHECKPOINT.parent / 'eagle'}",
    r"--checkpoint \S+": f"--checkpoint {CHECKPOINT}",
    r"--statistics-key KEY": f"--statistics-key {STATISTICS_KEY}",
}
COMMANDS = [
    one for one in documented_commands() if not re.match("|".join([ELSEWHERE, *NOT_RUN]), one.line)
]
DOCUMENTS = sorted({one.document for one in COMMANDS})


def test_few_commands_are_not_run_and_each_reason_is_needed() -> None:
    lines = [one.line for one in documented_commands()]
    assert len(NOT_RUN) <= 10
    assert [one for one in NOT_RUN if not any(re.match(one, line) for line in lines)] == []


@pytest.fixture
def readers_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_demonstrations(tmp_path / "data")
    record(tmp_path / "recordings", frame(8, 8)[0, 0, :1].astype(float).repeat(7))
    for name in ("image.png", "picture.png"):
        PIL.Image.fromarray(frame(64, 64)).save(tmp_path / name)
    store = ResultsStore(tmp_path / "results" / "run", header())
    store.append(episode())
    store.close()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(command: DocumentedCommand) -> list[str]:
    """The words of a command, with what is the reader's filled in."""
    line = command.line
    for mine, ours in OWN.items():
        line = re.sub(mine, ours, line)
    quick = next((more for begins, more in QUICK.items() if line.startswith(begins)), "")
    return shlex.split(f"{line.partition(' #')[0]} {quick}")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_says_can_be_typed_in_its_order(
    document: str, readers_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if document == "docs/datasets.md":
        pytest.importorskip("pyarrow", reason="pip install 'deft-client[datasets]'")
    for command in (one for one in COMMANDS if one.document == document):
        program, *arguments = typed(command)
        code = main_of(program)(arguments)
        said = capsys.readouterr()
        assert code == 0, f"{command}\n{said.err}"
        if re.match(LONG, command.line):
            next_command(said.out)
