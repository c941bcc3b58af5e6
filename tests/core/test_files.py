from pathlib import Path

import pytest

from deft_core.files import creating, replacing, write_atomically


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for content in (b"old", b"new"):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_readers_see_the_old_content_until_the_new_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    path.write_bytes(b"old")
    with replacing(path) as beside:
        beside.write_bytes(b"new")
        assert path.read_bytes() == b"old"
        assert beside.suffix == ".mp4"
    assert path.read_bytes() == b"new"


def test_what_breaks_half_way_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "episode.npz"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), replacing(path) as beside:
        beside.write_bytes(b"half") and beside.write_bytes(None)  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        write_atomically(tmp_path / "file" / "run.json", b"")


def test_a_folder_is_there_once_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "checkpoint"
    with creating(folder) as beside:
        (beside / "config.json").touch()
        assert not folder.exists()
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert list(folder.parent.iterdir()) == [folder]


def _half_a_folder(folder: Path) -> None:
    with creating(folder) as beside:
        (beside / "config.json").touch()
        raise ZeroDivisionError


def test_nothing_is_left_of_a_folder_that_was_not_finished(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        _half_a_folder(tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []
