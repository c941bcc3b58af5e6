"""Importing a module does nothing: no environment is read, no thread started, no file written."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.repository import LIGHT, PACKAGES, ROOT, tracked

HEAVY = {"torch", "transformers", "fastapi", "pydantic", "starlette", "uvicorn"}
SIMULATOR = {"libero", "robosuite", "mujoco", "bddl"}

# Imports the modules named on the command line one by one, with an eye on what they do.
WATCHED_IMPORT = '''
import logging, os, sys, threading
from importlib import import_module

OURS = ("deft_core", "deft_client", "deft_libero", "deft_policies", "deft_server",
        "deft_draft_training")
WATCHED = ("socket.connect", "socket.bind", "subprocess.Popen", "os.putenv", "os.mkdir")
complaints = []


def by_us():
    """Is it our module that does this, by itself or through the standard library?"""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(OURS):
            return name
        if name.partition(".")[0] not in sys.stdlib_module_names or "importlib" in name:
            return None
        frame = frame.f_back
    return None


def watch(event, arguments):
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if (event in WATCHED or writes) and (name := by_us()):
        complaints.append(f"{name}: {event} {arguments[0]!r}")


class WatchedEnvironment(type(os.environ)):
    def __getitem__(self, key):
        if name := by_us():
            complaints.append(f"{name}: reads the environment variable {key}")
        return super().__getitem__(key)


os.environ.__class__ = WatchedEnvironment
sys.addaudithook(watch)
for name in sys.argv[1:]:
    threads, handlers = threading.active_count(), len(logging.getLogger().handlers)
    import_module(name)
    if threading.active_count() > threads:
        complaints.append(f"{name}: started a thread")
    if len(logging.getLogger().handlers) > handlers:
        complaints.append(f"{name}: set up logging")
print("\\n".join(complaints), "\\n--", *sys.modules)
'''


def modules_of(package: str) -> list[str]:
    names = []
    for path in tracked(f"{PACKAGES[package]}/{package}/**"):
        if path.suffix == ".py" and path.stem != "__main__":
            parts = path.relative_to(ROOT / PACKAGES[package]).with_suffix("").parts
            names.append(".".join(part for part in parts if part != "__init__"))
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_every_module_of_a_package_does_nothing(package):
    names = modules_of(package)
    if find_spec("triton") is None:  # only x86-64 Linux has it
        names = [name for name in names if ".kernels." not in name]
    assert len(names) > 3, package
    run = subprocess.run(
        [sys.executable, "-c", WATCHED_IMPORT, *names], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    complaints, _, modules = run.stdout.partition("\n--")
    assert complaints.strip() == ""
    assert "ray" not in modules.split()
    if package in LIGHT:
        assert set(modules.split()).isdisjoint(HEAVY | SIMULATOR)


def test_the_watch_sees_what_it_is_for(tmp_path):
    """A check that cannot fail is none."""
    (tmp_path / "deft_client").mkdir()
    (tmp_path / "deft_client" / "__init__.py").touch()
    (tmp_path / "deft_client" / "bad.py").write_text(
        "import os, threading\n"
        "os.environ.get('HOME')\n"
        "open(os.devnull, 'w').close()\n"
        "threading.Thread(target=threading.Event().wait, args=(1,), daemon=True).start()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", WATCHED_IMPORT, "deft_client.bad"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
    )
    for expected in ("environment variable HOME", "open '/dev/null'", "started a thread"):
        assert expected in run.stdout


# Collects tests as pytest does, in a process in which torch cannot be imported.
COLLECTION_WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers")))
import pytest
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_tests_of_the_client_and_the_server_import_no_torch():
    command = [sys.executable, "-c", COLLECTION_WITHOUT_TORCH, "tests/core", "tests/client",
               "tests/libero", "tests/server"]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
