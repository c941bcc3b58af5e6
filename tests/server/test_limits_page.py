"""docs/security.md lists limits as they are."""

import re
from pathlib import Path

from deft_core.peers import arrays
from deft_core.wire import codec, images
from deft_core.wire.limits import WireLimits
from deft_server.commands import logs, serve
from deft_server.dashboard import pages
from deft_server.http import connections, frame_bodies, gate
from deft_server.serving import bounds, queue, service
from deft_server.settings import Settings

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text("utf-8")
ROW = re.compile(r"^\| [^|]+ \| ([\d.]+|none) \| (`?)(\w+)`? \|$", re.MULTILINE)
MODULES = (
    *(
        bounds,
        connections,
        frame_bodies,
        gate,
        arrays,
        codec,
        images,
        service,
        queue,
        pages,
        logs,
        serve,
    ),
    WireLimits(),
)
IS_LIMIT = re.compile(
    r"(^|_)max_(?!wait_ms)|_timeout_s$|^(keep_alive|hang_after|drain|session_ttl)_s$"
)


def rows() -> dict[str, str]:
    return {name: default for default, _, name in ROW.findall(PAGE)}


def in_force(name: str) -> object:
    if name in Settings.model_fields:
        return getattr(Settings(), name)
    found = [getattr(module, name) for module in MODULES if hasattr(module, name)]
    assert found, f"there is no limit {name}"
    return found[0]


def test_every_default_on_the_page_is_the_one_in_force():
    told = rows()
    assert len(told) > 30
    for name, default in told.items():
        value = in_force(name)
        assert default == (
            "none" if value is None else f"{value:g}" if type(value) is float else str(value)
        )


def test_every_setting_that_is_a_limit_is_on_the_page():
    assert {name for name in Settings.model_fields if IS_LIMIT.search(name)} <= set(rows())
