"""The table of recordings: a file's name and what makes it anew."""

import json
import re
from collections.abc import Callable
from difflib import unified_diff
from functools import partial
from typing import Any

from tests.black_box import files, helps, protocols
from tests.black_box.product import GOLDEN

FOLDER = GOLDEN / "black_box"
TOLERANCE = 1e-4  # logits differ by 2e-5 from one kind of processor to another; a bin is 8e-3 wide
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
Recording = dict[str, Any] | list[Any] | str

RECORDINGS: dict[str, Callable[[], Recording]] = {
    **{
        f"help/{name.replace(' ', '_')}.txt": partial(helps.said_by, name)
        for name in helps.COMMANDS
    },
    **{f"{name}.json": make for name, make in protocols.RECORDINGS.items()},
    **{f"{name}.json": make for name, make in files.RECORDINGS.items()},
}


def recorded_text(recording: Recording) -> str:
    """As it lies on disk: a line per value, short lists on one line."""
    if isinstance(recording, str):
        return recording
    return laid_out(json.loads(json.dumps(recording))) + "\n"


def laid_out(value: Any, indent: str = "") -> str:
    """JSON with an entry per line where one line would not hold it all."""
    line = json.dumps(value, ensure_ascii=False)
    is_row = isinstance(value, list) and not any(
        isinstance(one, dict | list | str) for one in value
    )
    if not value or not isinstance(value, dict | list) or is_row or len(indent) + len(line) <= 110:
        return line
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {laid_out(one, inner)}" for name, one in value.items()]
        opening, closing = "{}"
    else:
        parts = [laid_out(one, inner) for one in value]
        opening, closing = "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{closing}"


def stored(name: str) -> Recording:
    text = (FOLDER / name).read_text()
    return json.loads(text) if name.endswith(".json") else text  # type: ignore[no-any-return]


def stored_names() -> set[str]:
    """Every recording on disk."""
    found = [*FOLDER.glob("*.json"), *FOLDER.glob("help/*.txt")]
    return {str(path.relative_to(FOLDER)) for path in found}


def differences(was: Any, now: Any, where: str = "") -> list[str]:
    """Where two recordings differ; numbers with a fraction may by rounding."""
    if isinstance(was, str) and isinstance(now, str) and "\n" in was:
        lines = unified_diff(was.splitlines(), now.splitlines(), "was", "now", n=0, lineterm="")
        return list(lines)
    if isinstance(was, dict) and isinstance(now, dict):
        gone = [f"{where}/{name}: gone, was {brief(was[name])}" for name in was if name not in now]
        new = [f"{where}/{name}: new, {brief(now[name])}" for name in now if name not in was]
        same = [name for name in was if name in now]
        if not gone and not new and list(was) != list(now):
            new = [f"{where}: the order was {list(was)}, now it is {list(now)}"]
        inside = [
            one for name in same for one in differences(was[name], now[name], f"{where}/{name}")
        ]
        return gone + new + inside
    if isinstance(was, list) and isinstance(now, list):
        if len(was) != len(now):
            return [f"{where}: {brief(was)} became {brief(now)}"]
        return [
            one
            for number, (old, new) in enumerate(zip(was, now, strict=True))
            for one in differences(old, new, f"{where}[{number}]")
        ]
    if isinstance(was, float) and isinstance(now, float) and abs(was - now) <= TOLERANCE:
        return []
    if isinstance(was, str) and isinstance(now, str) and same_text(was, now):
        return []
    if type(was) is type(now) and was == now:
        return []
    return [f"{where}: {brief(was)} became {brief(now)}"]


def same_text(was: str, now: str) -> bool:
    """Equal but for the rounding of the numbers with a fraction in it."""
    if was == now:
        return True
    olds, news = _NUMBER.findall(was), _NUMBER.findall(now)
    close = [
        abs(float(old) - float(new)) <= TOLERANCE for old, new in zip(olds, news, strict=False)
    ]
    return _NUMBER.sub("", was) == _NUMBER.sub("", now) and len(olds) == len(news) and all(close)


def brief(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else text[:300] + "..."
