"""Initial states come as pickles from elsewhere: only arrays of floats may get in."""

import os
import pickle
import zipfile

import numpy as np
import pytest

from deft_client.libero.errors import InitialStatesError
from deft_client.libero.simulator.init_states import load_initial_states

TABLE = np.linspace(0.0, 1.0, 12).reshape(3, 4)


class Intruder:
    def __reduce__(self):
        return os.mkdir, ("intruder_was_here",)


def packed(path, content: object, name: str = "archive/data.pkl"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, pickle.dumps(content, protocol=2))
    return path


def test_a_table_of_floats_is_read_as_it_was_written(tmp_path):
    states = load_initial_states(packed(tmp_path / "good", TABLE))
    np.testing.assert_array_equal(states, TABLE)


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InitialStatesError, match="only arrays are admitted"):
        load_initial_states(packed(tmp_path / "bad", [TABLE, Intruder()]))
    assert not (tmp_path / "intruder_was_here").exists()


@pytest.mark.parametrize(
    "content",
    [
        np.array([[object()]], dtype=object),
        TABLE.astype(np.float32),
        TABLE.ravel(),
        [1.0, 2.0],
        np.array([[1.0, np.nan]]),
    ],
    ids=["objects", "float32", "one dimension", "a list", "not a number"],
)
def test_anything_but_one_finite_float64_table_is_refused(tmp_path, content):
    with pytest.raises(InitialStatesError, match=str(tmp_path)):
        load_initial_states(packed(tmp_path / "odd", content))


def test_files_that_are_no_archive_or_not_there_are_named(tmp_path):
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(InitialStatesError, match="not a zip file"):
        load_initial_states(tmp_path / "text")
    with pytest.raises(InitialStatesError, match="is LIBERO complete"):
        load_initial_states(tmp_path / "nothing")
    with pytest.raises(InitialStatesError, match=r"one data\.pkl, got 0"):
        load_initial_states(packed(tmp_path / "empty", TABLE, name="archive/version"))


def test_a_truncated_pickle_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "short"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(TABLE, protocol=2)[:-20])
    with pytest.raises(InitialStatesError, match="short"):
        load_initial_states(path)
