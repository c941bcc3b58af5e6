"""Digests of weight files: every byte counts, wherever it lies."""

from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event

import pytest

from deft_policies.checkpoint.tensor_file import digest_weights
from deft_policies.errors import PolicyError
from deft_policies.families import loading
from deft_policies.families.openvla import OpenVLAFamily
from deft_policies.families.options import ModelOptions
from tests import golden

MIB = 2**20


@pytest.mark.parametrize("place", [0, 64 * MIB, 65 * MIB - 1])
def test_one_changed_byte_changes_the_digest(tmp_path: Path, place: int) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with path.open("r+b") as file:
        file.truncate(65 * MIB)
        before = digest_weights([tmp_path])
        file.seek(place)
        file.write(b"x")
    assert digest_weights([tmp_path]) != before


def test_files_that_hold_no_weights_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = digest_weights([tmp_path])
    (tmp_path / "training.json").write_text("{}")
    (tmp_path / "optimizer.pt").write_bytes(b"moments")
    assert digest_weights([tmp_path, tmp_path, tmp_path / "absent"]) == before


def test_hashing_ends_when_nobody_wants_it_any_more(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    unwanted = Event()
    assert digest_weights([tmp_path], unwanted) == digest_weights([tmp_path])
    unwanted.set()
    with pytest.raises(CancelledError):
        digest_weights([tmp_path], unwanted)


def test_a_command_that_fails_while_it_loads_gives_up_hashing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Event] = []

    def digest(folders: object, unwanted: Event) -> str:
        given.append(unwanted)
        assert unwanted.wait(120), "nobody gave it up"
        return ""

    def fail(*given: object) -> None:
        raise PolicyError("no memory today")

    monkeypatch.setattr(loading, "digest_weights", digest)
    monkeypatch.setattr(OpenVLAFamily, "load", fail)
    with pytest.raises(PolicyError, match="no memory today"):
        loading.load_policy(ModelOptions(checkpoint=str(golden.TINY_OPENVLA)))
    assert [one.is_set() for one in given] == [True]
