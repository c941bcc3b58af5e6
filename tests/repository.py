"""The repository as its rules see it: tracked files, commands in documents."""

import ast
import re
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Import packages by the folder that they lie in.
PACKAGES = {
    "deft_core": "client",
    "deft_client": "client",
    "deft_libero": "client",
    "deft_policies": "policies",
    "deft_server": "server",
    "deft_draft_training": "draft_training",
}
LIGHT = ("deft_core", "deft_client", "deft_libero")
_TEXT_SUFFIXES = {
    *(".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".cfg", ".json", ".html", ".css", ".js"),
    *(".sh", ".svg", ".xml", ""),
}


@lru_cache
def tracked(*patterns: str) -> list[Path]:
    """Files that git knows or would take, as far as they exist."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--"]
    listed = subprocess.run([*command, *patterns], cwd=ROOT, capture_output=True, check=True)
    paths = sorted({ROOT / name for name in listed.stdout.decode().split("\0") if name})
    return [path for path in paths if path.is_file()]


def name_of(path: Path) -> str:
    """A path as reports show it."""
    return path.relative_to(ROOT).as_posix()


@lru_cache
def texts() -> list[tuple[str, str]]:
    """Name and content of every tracked text file."""
    return [
        (name_of(path), path.read_text("utf-8"))
        for path in tracked()
        if path.suffix in _TEXT_SUFFIXES and path.stat().st_size < 2**20
    ]


@lru_cache
def code(*folders: str) -> list[tuple[str, list[ast.AST]]]:
    """Name and syntax of every Python file under some folders; the module itself comes first."""
    return [
        (name, list(ast.walk(ast.parse(text))))
        for name, text in texts()
        if name.endswith(".py") and name.startswith(tuple(f"{folder}/" for folder in folders))
    ]


@dataclass(frozen=True)
class DocumentedCommand:
    """One line of a shell block in a document."""

    document: str
    line: str

    def __str__(self) -> str:
        return f"{self.document}: {self.line}"


def documents() -> list[Path]:
    """Every page for people, except notes beside data."""
    return [*tracked("*.md", "docs/*.md")]


def documented_commands() -> list[DocumentedCommand]:
    """Every line of every ```bash block."""
    found = []
    for path in documents():
        for block in re.findall(
            r"^```(?:bash|sh|console)\n(.*?)^```", path.read_text(), re.M | re.S
        ):
            lines = re.sub(r"\\\n\s*", " ", block).splitlines()
            found += [
                DocumentedCommand(name_of(path), line.strip()) for line in lines if line.strip()
            ]
    return found
