import gzip
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deft_libero.errors import ResultsError, ResultsMismatchError, ResultsWriteError
from deft_libero.results.records import EpisodeRecord, Outcome, decode_record, encode_record
from deft_libero.results.store import (
    ResultsStore,
    RunResults,
    load_run,
    load_runs,
    pack_runs,
    unpack_runs,
)
from tests.libero.episodes import header, record


def _columns(one: EpisodeRecord) -> dict[str, object]:
    return {**vars(one), "actions": None}


def _write(folder: Path, *records: EpisodeRecord) -> None:
    store = ResultsStore(folder, header())
    for one in records:
        store.append(one)
    store.close()


def test_a_record_survives_its_line_to_the_last_bit() -> None:
    original = record(num_steps=50)
    read = decode_record(encode_record(original, "r1"), "r1", "here")
    assert _columns(read) == _columns(original)
    assert read.actions.tobytes() == original.actions.tobytes()


def test_what_was_written_survives_its_line_with_what_it_took() -> None:
    original = record()
    thinking = tuple(
        replace(one, reasoning=f"lift “{number}”", text_passes=2, text_ms=7.5, action_ms=0.125)
        for number, one in enumerate(original.answers)
    )
    original = replace(original, answers=thinking)
    assert decode_record(encode_record(original, "r1"), "r1", "here").answers == thinking


@pytest.mark.parametrize("plans", [("tree",) * 4, ("tree", "autoregressive", "tree", "tree")])
def test_the_plan_of_every_answer_survives_its_line(plans: tuple[str, ...]) -> None:
    original = record()
    answers = [replace(one, plan=plan) for one, plan in zip(original.answers, plans, strict=True)]
    original = replace(original, answers=tuple(answers))
    assert decode_record(encode_record(original, "r1"), "r1", "here").answers == original.answers


def test_an_episode_that_broke_before_its_first_step_survives_its_line() -> None:
    original = replace(record(outcome=Outcome.ERRORED), actions=np.zeros((0, 7)), answers=())
    read = decode_record(encode_record(original, "r1"), "r1", "here")
    assert _columns(read) == _columns(original)
    assert read.num_steps == 0


def test_a_line_is_small() -> None:
    assert len(encode_record(record(num_steps=280), "r1")) < 60_000


def test_a_run_that_is_opened_again_knows_what_is_done(tmp_path: Path) -> None:
    _write(tmp_path, record(0, 1), record(0, 0, Outcome.FAILED))
    store = ResultsStore(tmp_path, header(run="another id, for the same options"))
    assert [one.key.trial for one in store.resumed] == [0, 1]
    assert store.header.run == "r1"
    store.append(record(1, 0))
    store.close()
    assert [one.key.task for one in load_run(tmp_path).records] == [0, 0, 1]


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_torn_last_line_is_cut_off_and_only_that_episode_is_lost(
    tmp_path: Path, kept: int
) -> None:
    _write(tmp_path, record(0, 0), record(0, 1))
    path = tmp_path / "episodes.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:kept])
    assert load_run(tmp_path).has_torn_line
    store = ResultsStore(tmp_path, header())
    assert [one.key.trial for one in store.resumed] == [0]
    store.append(record(0, 1))
    store.close()
    assert path.read_bytes() == first + second


def test_errored_episodes_are_to_be_played_again_and_leave_no_line(tmp_path: Path) -> None:
    _write(tmp_path, record(0, 0), record(0, 1, Outcome.ERRORED))
    store = ResultsStore(tmp_path, header())
    assert [one.key.trial for one in store.resumed] == [0]
    store.append(record(0, 1))
    store.close()
    outcomes = [one.outcome for one in load_run(tmp_path).records]
    assert outcomes == [Outcome.SUCCEEDED, Outcome.SUCCEEDED]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    _write(tmp_path, record(0, 0), record(0, 1))
    path = tmp_path / "episodes.jsonl"
    content = path.read_bytes()
    path.write_bytes(b"{" + content[5:])
    with pytest.raises(ResultsError, match=r"episodes\.jsonl line 1"):
        ResultsStore(tmp_path, header())
    assert path.read_bytes() == b"{" + content[5:]


def test_an_episode_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    _write(tmp_path, record(0, 0))
    path = tmp_path / "episodes.jsonl"
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ResultsError, match="line 2"):
        load_run(tmp_path)


def test_a_line_of_another_run_is_an_error(tmp_path: Path) -> None:
    _write(tmp_path, record(0, 0))
    path = tmp_path / "episodes.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"run":"r1"', b'"run":"r2"'))
    with pytest.raises(ResultsError, match="'r2'"):
        load_run(tmp_path)


def test_results_of_other_options_are_refused_with_every_difference(tmp_path: Path) -> None:
    _write(tmp_path, record(0, 0))
    other = replace(header(decoding="deft", radius="9"), assets="real 99")
    with pytest.raises(ResultsMismatchError) as caught:
        ResultsStore(tmp_path, other)
    text = str(caught.value)
    assert "decoding: there 'lossless', now 'deft'" in text
    assert "radius: there 'not noted', now '9'" in text
    assert "assets: there 'stand-in 1234', now 'real 99'" in text
    assert len(load_run(tmp_path).records) == 1


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, record(0, 0))
    newer = replace(header(), versions={"deft-client": "9.9"})
    with pytest.raises(ResultsMismatchError, match="version of deft-client: there '0.1.0'"):
        ResultsStore(tmp_path, newer)


def test_results_of_another_format_version_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, record(0, 0))
    path = tmp_path / "run.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "format_version": 7}))
    with pytest.raises(ResultsMismatchError, match="format version 7"):
        ResultsStore(tmp_path, header())


@pytest.mark.parametrize("content", ["", "[]", '{"format": "else"}', "{torn"])
def test_a_header_that_is_none_is_an_error(tmp_path: Path, content: str) -> None:
    _write(tmp_path, record(0, 0))
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ResultsError, match=r"run\.json"):
        load_run(tmp_path)


def test_a_folder_without_results_says_so(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="holds no results"):
        load_run(tmp_path)


def test_episodes_without_a_header_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "episodes.jsonl").write_bytes(b"precious\n")
    with pytest.raises(ResultsError, match=r"no run\.json"):
        ResultsStore(tmp_path, header())
    assert (tmp_path / "episodes.jsonl").read_bytes() == b"precious\n"


def test_two_evaluations_cannot_write_to_one_folder(tmp_path: Path) -> None:
    store = ResultsStore(tmp_path, header())
    with pytest.raises(ResultsError, match="another evaluation"):
        ResultsStore(tmp_path, header())
    store.close()
    ResultsStore(tmp_path, header()).close()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResultsWriteError, match="--out"):
        ResultsStore(tmp_path / "file" / "results", header())


_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from deft_libero.errors import ResultsWriteError
from deft_libero.results.store import ResultsStore
from tests.libero.episodes import header, record
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = ResultsStore(Path(sys.argv[1]), header())
store.append(record(0, 0))
limit = int(1.5 * (Path(sys.argv[1]) / "episodes.jsonl").stat().st_size)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    store.append(record(0, 1))
except ResultsWriteError as error:
    print(error)
"""


def test_a_full_disk_is_a_clear_error_and_leaves_whole_lines_only(tmp_path: Path) -> None:
    """A file size limit stands in for the full disk: the second line fits only in part."""
    assert resource.RLIMIT_FSIZE  # the platform can play a full disk
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": "client:."},
        cwd=Path(__file__).parents[3],
    )
    assert "1 episodes" in done.stdout
    run = load_run(tmp_path)
    assert (len(run.records), run.has_torn_line) == (1, False)


def test_a_disk_that_is_gone_is_said_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    """Not even the half line can be taken back then; opening the run again does that."""
    store = ResultsStore(tmp_path, header())
    store.append(record(0, 0))
    assert store._file is not None
    descriptor = store._file.fileno()
    kept = os.dup(descriptor)
    os.close(descriptor)  # as if the file system had been taken away
    with pytest.raises(ResultsWriteError, match="1 episodes"):
        store.append(record(0, 1))
    os.dup2(kept, descriptor)
    os.close(kept)
    store.close()
    assert [one.key.trial for one in load_run(tmp_path).records] == [0]


def test_an_older_packed_copy_is_refused(
    tmp_path: Path,
) -> None:
    """`gzip -k` during a run, then the same command: the copy used to take the episodes' place."""
    _write(tmp_path, record(0, 0))
    path = tmp_path / "episodes.jsonl"
    packed = tmp_path / "episodes.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert len(load_run(tmp_path).records) == 1  # the same: a kill came between
    packed.rename(tmp_path / "aside")
    _write(tmp_path, record(0, 1))
    (tmp_path / "aside").rename(packed)
    content = path.read_bytes()
    with pytest.raises(ResultsError, match="keep the newer one"):
        load_run(tmp_path)
    with pytest.raises(ResultsError, match="keep the newer one"):
        ResultsStore(tmp_path, header())
    assert path.read_bytes() == content
    packed.unlink()
    assert len(load_run(tmp_path).records) == 2


def test_packed_runs_are_read_as_their_folders_are(tmp_path: Path) -> None:
    for name in ("a", "b"):
        store = ResultsStore(tmp_path / "runs" / name, header(name))
        store.append(record(trial=1))
        store.close()
    runs, packed = load_runs(tmp_path / "runs"), tmp_path / "runs.jsonl.gz"
    pack_runs(packed, runs)
    read = load_runs(packed)
    assert [run.header for run in read] == [run.header for run in runs]
    assert [run.folder.name for run in read] == ["a", "b"]
    assert [_columns(one) for run in read for one in run.records] == [
        _columns(one) for run in runs for one in run.records
    ]
    before = packed.read_bytes()
    pack_runs(packed, read)
    assert packed.read_bytes() == before
    unpack_runs(packed, tmp_path / "again")
    store = ResultsStore(tmp_path / "again" / "a", header("a"))
    store.append(record(trial=2))
    store.close()
    unpack_runs(packed, tmp_path / "again")  # what is there is left alone
    assert [len(run.records) for run in load_runs(tmp_path / "again")] == [2, 1]


def test_episodes_that_were_packed_later_go_on_with_their_runs(tmp_path: Path) -> None:
    """The old bytes stay as they are, with the new ones behind them."""
    runs = [RunResults(tmp_path / name, header(name), (record(trial=1),)) for name in ("a", "b")]
    first, second, both = (tmp_path / f"{name}.jsonl.gz" for name in ("first", "second", "both"))
    pack_runs(first, runs)
    pack_runs(second, [replace(one, records=(record(trial=2),)) for one in runs])
    both.write_bytes(first.read_bytes() + second.read_bytes())
    assert [[one.key.trial for one in run.records] for run in load_runs(both)] == [[1, 2], [1, 2]]


def test_packed_runs_that_are_damaged_are_refused_with_the_place(tmp_path: Path) -> None:
    packed = tmp_path / "runs.jsonl.gz"
    packed.write_bytes(b"nothing")
    with pytest.raises(ResultsError, match="holds no packed results"):
        load_runs(packed)
    packed.write_bytes(gzip.compress(encode_record(record(), "a")))
    with pytest.raises(ResultsError, match="line 1: an episode before the header"):
        load_runs(packed)


@pytest.mark.parametrize(
    "damage", [{"options": "none"}, {"options": {"seed": 7}}, {"server": 3}, {"name": None}]
)
def test_a_header_of_another_kind_is_refused_with_the_field(
    tmp_path: Path, damage: dict[str, object]
) -> None:
    _write(tmp_path, record())
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    with pytest.raises(ResultsError, match=next(iter(damage))):
        load_run(tmp_path)


def test_results_nested_without_end_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, record())
    deep = b"[" * 100_000
    (tmp_path / "episodes.jsonl").write_bytes(deep + b"\n")
    with pytest.raises(ResultsError, match=r"episodes\.jsonl line 1"):
        load_run(tmp_path)
    (tmp_path / "run.json").write_bytes(deep)
    with pytest.raises(ResultsError, match=r"run\.json"):
        load_run(tmp_path)


def test_rotten_bits_of_packed_episodes_are_said_in_a_sentence(tmp_path: Path) -> None:
    _write(tmp_path, *(record(trial=trial) for trial in range(20)))
    packed = bytearray(gzip.compress((tmp_path / "episodes.jsonl").read_bytes()))
    packed[len(packed) // 2 : len(packed) // 2 + 40] = b"x" * 40
    (tmp_path / "episodes.jsonl.gz").write_bytes(packed)
    (tmp_path / "episodes.jsonl").unlink()
    with pytest.raises(ResultsError, match="cannot be read"):
        load_run(tmp_path)
    (tmp_path / "runs.gz").write_bytes(packed)
    with pytest.raises(ResultsError, match="holds no packed results"):
        load_runs(tmp_path / "runs.gz")


@pytest.mark.parametrize("name", ["run.json", "episodes.jsonl", "episodes.jsonl.gz"])
def test_a_pipe_in_place_of_results_is_refused_and_not_waited_for(
    tmp_path: Path, name: str
) -> None:
    _write(tmp_path, record())
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ResultsError, match="not a regular file"):
        load_run(tmp_path)
