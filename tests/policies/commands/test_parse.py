"""The line that says what to type next names the policy that was meant."""

import shlex
from argparse import ArgumentParser

import pytest

from deft_policies.commands.parse import parse_command, target_flags

LINES = [
    "--checkpoint dir --adapter lora --statistics-key goal --chunk 8 --pictures 2",
    "--random-weights small --dtype bfloat16 --quantization int8 --no-graphs --threads 1",
    "--checkpoint 'my runs/a' --family oft --image-chain oft-uncropped",
    "--checkpoint dir --draft-head a --draft-head b --drafts previous,head --draft-tree chain:3",
    "--policy openvla --checkpoint dir --radius 3 --temperature 0.5",
    "--policy sleeping --sleep-ms 20",
    "",
]


@pytest.mark.parametrize("line", LINES)
def test_no_flag_is_lost(line: str) -> None:
    given = parse_command(ArgumentParser(), shlex.split(line)).namespace
    told = target_flags(given)
    again = parse_command(ArgumentParser(), shlex.split(told)).namespace
    assert vars(again) == vars(given)


def test_what_is_the_default_is_not_told() -> None:
    line = "--checkpoint dir --quantization none"
    assert target_flags(parse_command(ArgumentParser(), line.split()).namespace) == (
        "--checkpoint dir"
    )
