"""`deft doctor --against`: Deft beside another interpreter's answers, and the report of both.

The other environment has a stand-in of NORA's module. It answers as NORA's own class did when the
golden files were made, so equal answers here are those of the original.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deft_core.recordings import EpisodeHeader, RecordedStep, encode_header, encode_step
from deft_core.types import ActionChunk, ActOptions, Observation
from deft_policies.conformance import report
from deft_server.commands import doctor
from tests.golden_qwenfast import GOLDEN, cameras, variant

STRIDE = 5  # steps between the frames that are taken
WHOLE = [one for one in variant("nora")["cases"] if one["max_new_tokens"] == 20]
STAND_IN = """
import hashlib
import json
import os
from types import SimpleNamespace

import numpy as np
import torch

print("what a model's code prints")
ANSWERS = json.loads(open(os.environ["STAND_IN_ANSWERS"]).read())


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(2, 8, bias=False)

    def get_output_embeddings(self):
        return self.lm_head

    def generate(self, input_ids, tokens):
        for _ in tokens:
            self.lm_head(torch.zeros(1, 1, 2))
        return torch.cat([input_ids, torch.tensor([tokens])], dim=1)


class Nora:
    def __init__(self, path, device, torch_dtype):
        assert torch_dtype is torch.float32
        self.model, self.fast_tokenizer = Network(), SimpleNamespace()

    def inference(self, image, instruction, unnorm_key):
        digest = hashlib.sha256(image.tobytes()).hexdigest()
        found = ANSWERS[digest + instruction + unnorm_key]
        self.model.generate(input_ids=torch.tensor([[1]]), tokens=found["tokens"])
        return np.array(found["actions"])
"""


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Every golden frame whose answer was not cut short, several times so that it is taken."""
    steps = []
    for one in WHOLE:
        (image,) = cameras(one)
        seen = Observation(image, one["instruction"])
        for _ in range(STRIDE):
            options = ActOptions(statistics_key=one["statistics_key"])
            chunk = ActionChunk(np.zeros((1, 7)))
            steps.append(RecordedStep(len(steps), 0.1 * len(steps), seen, options, chunk))
    path = tmp_path / "episodes" / "one.deftrec"
    path.parent.mkdir()
    path.write_bytes(encode_header(EpisodeHeader("arm", 0.0)) + b"".join(map(encode_step, steps)))
    return path.parent


Compare = Callable[..., int]


@pytest.fixture
def compare(recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Run the command against the stand-in; `answers` changes what that answers."""
    package = tmp_path / "own" / "inference"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "nora.py").write_text(STAND_IN)
    (tmp_path / "own" / "qwen_vl_utils.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    monkeypatch.setenv("DEFT_CACHE_DIR", str(tmp_path / "cache"))
    for name in [one for one in os.environ if one.startswith("DEFT_SERVER_")]:
        monkeypatch.delenv(name)

    def run(
        answers: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda number, one: one,
        python: str = sys.executable,
    ) -> int:
        known = {}
        for number, one in enumerate(WHOLE):
            (image,) = cameras(one)
            key = hashlib.sha256(image.tobytes()).hexdigest()
            found = {"tokens": one["generated_ids"], "actions": one.get("actions", [[0.0] * 7])}
            known[key + one["instruction"] + "bridge_orig"] = answers(number, found)
        (tmp_path / "answers.json").write_text(json.dumps(known))
        monkeypatch.setenv("STAND_IN_ANSWERS", str(tmp_path / "answers.json"))
        return doctor.main(
            [
                *("--checkpoint", str(GOLDEN / "nora"), "--statistics-key", "bridge_orig"),
                *("--device", "cpu", "--dtype", "float32", "--port", "0"),
                *("--against", python, "--recording", str(recording)),
                *("--report", str(tmp_path / "report.json")),
            ]
        )

    return run


def test_deft_answers_as_the_own_code_did(
    compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare() == 0
    said = capsys.readouterr().out
    assert f"{len(WHOLE)} of {len(WHOLE)}" in said
    assert "every token is equal" in said
    found = report.read(tmp_path / "report.json")
    own, plain, lossless = found["rows"]
    assert own["name"] == "the model's own code"
    mean = np.mean([len(one["generated_ids"]) for one in WHOLE])
    assert own["passes"] == plain["passes"] == pytest.approx(mean)
    assert lossless["passes"] <= plain["passes"]
    # What Deft reads as no action, the original reads as one all the same.
    assert plain["num_actions"] == sum(one["valid"] for one in WHOLE)
    assert plain["actions_apart"] < 1e-9
    assert found["family"] == "nora"
    assert found["checkpoint"]["name"] == "nora"
    assert len(found["checkpoint"]["digest"]) == 64
    assert found["frames"]["source"] == "recorded"
    assert found["own_code"]["torch"]
    assert str(tmp_path) not in json.dumps(found)  # it is made to be posted


def test_an_answer_that_differs_is_an_error_and_is_shown(
    compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed(number: int, one: dict[str, Any]) -> dict[str, Any]:
        tokens = [*one["tokens"]]
        if number == 1:
            tokens[2] = 5  # far from likely
        return {**one, "tokens": tokens}

    assert compare(changed) == 1
    said = capsys.readouterr().out
    assert "answers differ by more than rounding explains" in said
    parting = report.read(tmp_path / "report.json")["partings"][0]
    assert (parting["frame"], parting["position"], parting["own"]) == (1, 2, 5)
    assert parting["margin"] > 1e-3
    assert not parting["is_near_tie"]


def test_actions_that_differ_are_an_error_even_where_tokens_are_equal(
    compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    def moved(number: int, one: dict[str, Any]) -> dict[str, Any]:
        return {**one, "actions": (np.array(one["actions"]) + 0.01).tolist()}

    assert compare(moved) == 1
    assert "actions differ by up to" in capsys.readouterr().out


def test_an_environment_without_the_own_code_is_said_at_once(
    compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(tmp_path / "own" / "inference")
    assert compare() == 1
    said = capsys.readouterr()
    assert "this environment has no inference" in said.out
    assert "loading the weights" not in said.err
    assert compare(python=str(tmp_path / "nowhere")) == 1
    assert "give the python of an environment" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise RuntimeError('no such kernel')", "no such kernel"),
        ("import os; os._exit(3)", "has ended"),
    ],
)
def test_own_code_that_fails_is_quoted(
    code: str, told: str, compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own" / "inference" / "nora.py").write_text(code)
    assert compare() == 1
    assert told in capsys.readouterr().out


READY = b'{"versions": {"torch": "2.9"}}'


@pytest.mark.parametrize(
    "line", [b"\x80\x04N.", b"[]", b'{"ms": 1, "tokens": ["one"], "actions": null}', b"{" * 99]
)
def test_what_is_no_answer_is_refused(line: bytes, tmp_path: Path) -> None:
    """A pickle is a line that is no JSON, and nothing else."""
    from deft_policies.conformance import kit
    from deft_policies.errors import PolicyError

    path = tmp_path / "python"
    ready, answer = (f"read line\nprintf '%b\\n' '{escaped(one)}'\n" for one in (READY, line))
    path.write_text(f"#!/bin/sh\n{ready}{answer}read line\n")
    path.chmod(0o755)
    with pytest.raises(PolicyError, match="an answer cannot be used"):
        kit.ask_own_code(str(path), {}, [{}])


def escaped(line: bytes) -> str:
    return "".join(f"\\0{one:03o}" for one in line)


def test_a_report_that_was_changed_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    row = report.Row(report.OWN_CODE, 20, 5.0)
    about = {"family": "nora", "dtype": "float32", "device": "cpu", "verdict": "equal"}
    report.write(path, {**about, "is_equal": True}, [row], [])
    assert doctor.main(["--check-report", str(path)]) == 0
    assert "is as it was written: nora in float32 on cpu, equal" in capsys.readouterr().out
    found = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(found.items()))))  # the order says nothing
    assert doctor.main(["--check-report", str(path)]) == 0
    found["rows"][0]["ms"] = 1.0
    path.write_text(json.dumps(found))
    assert doctor.main(["--check-report", str(path)]) == 1
    assert "was changed after it was written" in capsys.readouterr().out
    path.write_text("{}")
    assert doctor.main(["--check-report", str(path)]) == 1


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_a_report_can_be_signed_as_the_page_says(tmp_path: Path) -> None:
    path, key = tmp_path / "conformance.json", tmp_path / "key"
    report.write(path, {}, [], [])
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
    subprocess.run(make, check=True)
    sign = ["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", "deft-conformance", str(path)]
    subprocess.run(sign, check=True)
    check = ["ssh-keygen", "-Y", "check-novalidate", "-n", "deft-conformance"]
    check += ["-s", f"{path}.sig"]
    assert subprocess.run(check, input=path.read_bytes()).returncode == 0
    assert subprocess.run(check, input=path.read_bytes() + b" ").returncode != 0


@pytest.mark.parametrize(
    ("own", "deft", "parted"),
    [
        ((1, 2), (1, 2), None),
        ((1, 2), (1, 3), (1, 2, 3)),
        ((1, 2), (1,), (1, 2, None)),
        ((), (7,), (0, None, 7)),
    ],
)
def test_answers_part_at_the_first_token_that_differs(
    own: tuple[int, ...], deft: tuple[int, ...], parted: tuple[int, int | None, int | None] | None
) -> None:
    assert report.first_difference(own, deft) == parted


def row(name: str, **found: Any) -> report.Row:
    return report.Row(name, 20, 5.0, **found)


def test_near_ties_are_no_fault_and_nothing_in_common_is() -> None:
    tie = report.Parting("Deft, lossless", 3, 2, 7, 8, 1e-5, is_near_tie=True)
    equal = row("Deft, lossless", equal_tokens=19, num_actions=19, actions_apart_share=0.0)
    assert report.verdict([equal], [tie], False) == (True, "equal but for 1 near ties")
    nothing = row("Deft, lossless", equal_tokens=20, num_actions=0)
    assert not report.verdict([nothing], [], False)[0]
    head = row("Deft", num_actions=20, actions_apart_share=0.04)
    assert report.verdict([head], [], True)[0]
    assert not report.verdict([head], [], False)[0]
