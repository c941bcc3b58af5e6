"""RLDS episodes in TFRecord files, written here byte by byte after the formats' descriptions."""

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PillowImage

from deft_core.datasets import rlds
from deft_core.datasets.episodes import DatasetError
from deft_core.datasets.formats import read_dataset

FEATURES = {
    "featuresDict": {
        "features": {
            "steps": {
                "sequence": {
                    "feature": {
                        "featuresDict": {
                            "features": {
                                "action": {"tensor": {"shape": {"dimensions": ["7"]}}},
                                "language_instruction": {"text": {}},
                                "is_last": {"tensor": {"shape": {}}},
                                "observation": {
                                    "featuresDict": {
                                        "features": {
                                            "image": {"image": {}},
                                            "wrist_image": {"image": {}},
                                            "state": {"tensor": {"shape": {"dimensions": ["8"]}}},
                                        }
                                    }
                                },
                            }
                        }
                    }
                }
            },
            "episode_metadata": {"featuresDict": {"features": {"file_path": {"text": {}}}}},
        }
    }
}


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = b""
    while value > 0x7F:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def part(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def values(items: list[bytes] | np.ndarray) -> bytes:
    if isinstance(items, list):
        return part(1, b"".join(part(1, one) for one in items))
    if items.dtype == np.float32:
        return part(2, part(1, items.tobytes()))
    return part(3, part(1, b"".join(varint(int(one)) for one in items)))


def example(entries: dict[str, list[bytes] | np.ndarray]) -> bytes:
    features = [
        part(1, part(1, name.encode()) + part(2, values(items))) for name, items in entries.items()
    ]
    return part(1, b"".join(features))


def checksum(content: bytes) -> int:
    table = []
    for index in range(256):
        for _ in range(8):
            index = index >> 1 ^ (0x82F63B78 if index & 1 else 0)
        table.append(index)
    crc = 0xFFFFFFFF
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked(content: bytes) -> int:
    crc = checksum(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked(length)) + payload + struct.pack("<I", masked(payload))


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    PillowImage.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def episode(seed: int, steps: int = 3) -> dict[str, list[bytes] | np.ndarray]:
    rng = np.random.default_rng(seed)
    pictures = rng.integers(0, 256, (2, steps, 16, 16, 3), dtype=np.uint8)
    return {
        "steps/action": rng.normal(size=7 * steps).astype(np.float32),
        "steps/language_instruction": [b"put the cup down"] * steps,
        "steps/is_last": np.array([0] * (steps - 1) + [-1]),
        "steps/observation/image": [png(one) for one in pictures[0]],
        "steps/observation/wrist_image": [png(one) for one in pictures[1]],
        "steps/observation/state": rng.normal(size=8 * steps).astype(np.float32),
    }


def dataset(root: Path, name: str, episodes: list[dict[str, list[bytes] | np.ndarray]]) -> Path:
    folder = root / name / "1.0.0"
    folder.mkdir(parents=True)
    (folder / "features.json").write_text(json.dumps(FEATURES))
    file = folder / f"{name}-train.tfrecord-00000-of-00001"
    file.write_bytes(b"".join(record(example(one)) for one in episodes))
    return file


def test_the_checksum_of_the_reader_is_the_published_one():
    assert checksum(b"123456789") == 0xE3069283
    assert rlds._masked_checksum(b"123456789") == masked(b"123456789")


def test_episodes_come_back_as_they_were_written(tmp_path):
    wanted = [episode(0), episode(1, steps=5)]
    dataset(tmp_path, "kitchen", wanted)
    found = list(read_dataset(tmp_path / "kitchen"))
    assert len(found) == 2
    for one, entries in zip(found, wanted, strict=True):
        actions = np.asarray(entries["steps/action"]).reshape(-1, 7)
        states = np.asarray(entries["steps/observation/state"]).reshape(-1, 8)
        steps = list(one.steps())
        assert len(steps) == len(actions)
        for index, step in enumerate(steps):
            picture = PillowImage.open(io.BytesIO(entries["steps/observation/image"][index]))
            assert np.array_equal(step.observation.image, np.asarray(picture))
            assert np.array_equal(step.action, actions[index].astype(np.float64))
            assert np.array_equal(step.observation.state, states[index])
            assert step.observation.instruction == "put the cup down"
            assert step.observation.cameras == {}


def test_further_cameras_are_read_when_named(tmp_path):
    dataset(tmp_path, "kitchen", [episode(0)])
    cameras = ("wrist_image", "image")
    step = next(next(read_dataset(tmp_path, cameras)).steps())
    wrist = PillowImage.open(io.BytesIO(episode(0)["steps/observation/wrist_image"][0]))
    assert np.array_equal(step.observation.image, np.asarray(wrist))
    assert list(step.observation.cameras) == ["image"]


def test_liberos_gripper_is_brought_into_the_dialect_of_the_fine_tunes(tmp_path):
    """robosuite's -1 opens and +1 closes; the fine-tunes say 1 and 0."""
    entries = episode(0, steps=2)
    actions = np.zeros((2, 7), np.float32)
    actions[:, -1] = -1, 1
    entries["steps/action"] = actions.reshape(-1)
    dataset(tmp_path, "libero_spatial_no_noops", [entries])
    steps = list(next(read_dataset(tmp_path)).steps())
    assert [step.action[-1] for step in steps] == [1.0, 0.0]


def test_a_file_that_is_cut_off_is_named(tmp_path):
    file = dataset(tmp_path, "kitchen", [episode(0), episode(1)])
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DatasetError, match="at byte"):
        list(read_dataset(tmp_path))


def test_no_damage_raises_anything_but_a_dataset_error(tmp_path):
    file = dataset(tmp_path, "kitchen", [episode(0, steps=1)])
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(whole), 300):
        damaged = bytearray(whole)
        damaged[at] ^= int(rng.integers(1, 256))
        file.write_bytes(damaged)
        try:
            for one in read_dataset(tmp_path):
                list(one.steps())
        except DatasetError:
            pass


def test_an_episode_without_an_instruction_is_refused(tmp_path):
    entries = episode(0)
    del entries["steps/language_instruction"]
    dataset(tmp_path, "kitchen", [entries])
    with pytest.raises(DatasetError, match="steps/language_instruction"):
        list(next(read_dataset(tmp_path)).steps())
