"""The flags of `deft bench`, beside those of the policy it measures."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROG = "deft bench"


@dataclass(frozen=True)
class BenchOptions:
    """What is replayed, how, and what it is compared with."""

    sweep: "Sweep"
    num_frames: int
    num_warm_ups: int
    batch_sizes: tuple[int, ...]
    recording: Path | None
    pictures: Path | None
    scripts: tuple[float, ...]  # shares of right tokens
    is_guarded: bool
    has_baseline: bool
    has_audit: bool
    json_path: Path | None


def build_parser() -> ArgumentParser:
    """Declare the flags."""
    parser = ArgumentParser(
        prog=PROG,
        allow_abbrev=False,
        description="Replay observations through a policy; where the time goes, and how far from "
        "this device's limits.",
    )
    parser.add_argument("--frames", type=int, default=30, metavar="N", help="how many at most")
    parser.add_argument("--warm-ups", type=int, default=3, metavar="N", help="not counted")
    parser.add_argument("--batch", default="1", metavar="N[,N...]", help="observations per call")
    parser.add_argument(
        "--recording", type=Path, metavar="DIR", help="replay recorded episodes; default: generate"
    )
    parser.add_argument("--input", type=Path, metavar="JSONL", help="replay pictures, as deft act")
    parser.add_argument(
        "--against",
        choices=["transformers"],
        help="also run transformers' own Llama of the same weights, and print ratios",
    )
    parser.add_argument(
        "--scripted-drafts",
        metavar="SHARE[,SHARE...]",
        help="also run drafts that know the answer and get this share of its tokens right, 0 to 1, "
        "in the prefill and in the place of a draft head's path",
    )
    parser.add_argument(
        "--audit",
        action="store_true",
        help="list every token that differs between bfloat16 (or --quantization) and float32",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there too")
    return parser


@dataclass(frozen=True)
class Sweep:
    """Methods to compare, and radii for those of them that have one."""

    methods: tuple[str, ...]
    radii: tuple[int, ...]


def split_sweep(arguments: Sequence[str]) -> tuple[list[str], Sweep]:
    """Take every `--decoding` and `--radius` out, so that several may be given; others stay."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--decoding", action="append", default=[])
    parser.add_argument("--radius", action="append", type=int, default=[])
    found, rest = parser.parse_known_args(list(arguments))
    return rest, Sweep(tuple(dict.fromkeys(found.decoding)), tuple(dict.fromkeys(found.radius)))


def read_options(namespace: Namespace, sweep: Sweep) -> BenchOptions:
    """Collect the flags; raises `ValueError` for numbers that make no sense."""
    batch_sizes = tuple(int(part) for part in namespace.batch.split(","))
    if namespace.frames < 1 or namespace.warm_ups < 0 or min(batch_sizes) < 1:
        raise ValueError("--frames and --batch must be 1 or more, --warm-ups 0 or more")
    if namespace.recording is not None and namespace.input is not None:
        raise ValueError("give --recording or --input, not both")
    given = namespace.scripted_drafts
    scripts = () if given is None else tuple(float(part) for part in given.split(","))
    if not all(0.0 <= share <= 1.0 for share in scripts):
        raise ValueError(f"--scripted-drafts are shares from 0 to 1, got {given}")
    return BenchOptions(
        sweep=sweep,
        num_frames=namespace.frames,
        num_warm_ups=namespace.warm_ups,
        batch_sizes=batch_sizes,
        recording=namespace.recording,
        pictures=namespace.input,
        scripts=scripts,
        is_guarded=not getattr(namespace, "no_guard", False),
        has_baseline=namespace.against is not None,
        has_audit=namespace.audit,
        json_path=namespace.json,
    )
