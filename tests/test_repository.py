"""House rules that a machine can check. Each failure names the file and what to do about it."""

import ast
import re
import sys
from collections.abc import Iterator

import pytest

from deft_client.libero.simulator.assets import HOW_TO_INSTALL
from tests.repository import PACKAGES, ROOT, code, identifiers, name_of, texts, tracked, words

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_LINES = 400
MAX_TREE_BYTES = 80_000_000

# Synonyms of glossary words: {banned: use instead}.
BANNED = {
    "obs": "observation",
    "task_label": "instruction",
    "task_description": "instruction",
    "lang": "instruction",
    "action_plan": "action chunk",
    "action_sequence": "action chunk",
    "agent": "policy",
    "norm_stats": "action statistics",
    "unnorm_key": "statistics key",
    "hiddens": "features",
    "hs": "features",
    "ea_layer": "draft head",
    "cnet": "draft head",
    "drafter": "draft source",
    "speculator": "draft source",
    "retrieve_indices": "path",
    "medusa_mask": "ancestor mask",
    "naive": "autoregressive",
    "vanilla": "autoregressive",
    "elapsed": "a stage in ms, such as total_ms",
    "dt": "a period with its unit",
    "rollout": "episode",
    "rollouts": "episodes",
    "utils": "the name of what it does",
    "helpers": "the name of what it does",
}
BANNED_IN_DECODING = {"threshold": "radius", "tolerance": "radius", "relaxation": "radius"}
# Other projects' words, where their files and messages are read.
FOREIGN_WORDS = re.compile(
    r"openvla/|/model/|/checkpoint/|compat/|libero/policies/|simulator/environment"
)

# Facts about one model's vocabulary. They live with that model, under a name.
MODEL_FACTS = {29871, 31743, 31744, 31745, 31872, 31999, 32000, 32001, 32064}

# Where bytes become objects, or a library dictates the signature: {file: why}.
UNTYPED_MAPS = {
    "client/deft_client/libero/results/records.py": "JSON lines",
    "client/deft_client/libero/simulator/standins/model.py": "JSON table",
    "client/deft_client/wire/fields.py": "messages and their JSON schemas",
    "client/deft_client/datasets/lerobot.py": "rows and JSON of LeRobot's data sets",
    "client/deft_client/datasets/lerobot_export.py": "rows and JSON of LeRobot's data sets",
    "client/deft_client/datasets/rlds.py": "the JSON that describes a data set's features",
    "client/deft_client/libero/simulator/gym.py": "Gymnasium's info and options",
    "draft_training/deft_draft_training/config.py": "TOML",
    "draft_training/deft_draft_training/run_directory.py": "JSON",
    "server/deft_server/app.py": "FastAPI's own signature",
    "server/deft_server/commands/settings_sources.py": "TOML and environment",
}
# The product's name for machines that are not ours, put together here so that this file is clean.
_ROOTS = "|".join(("wo" + "rk", "fa" + "rm", "ro" + "ot", "opt"))
MACHINE_PATHS = re.compile(rf"(?<![\w.])/(?:{_ROOTS})/")
_HOSTS = (
    "pypi" + r"\.org",
    "python" + "hosted",
    r"download\.py" + "torch",
    "registry" + r"\.npmjs",
)
REGISTRY_HOSTS = re.compile("|".join((*_HOSTS, "anaconda" + r"\.org")))


def report(findings: Iterator[str] | list[str]) -> None:
    lines = list(findings)
    assert not lines, "\n" + "\n".join(lines)


def test_files_fit_in_the_head():
    report(
        f"{name_of(path)}: {count} lines, at most {MAX_LINES}; split it by what it knows"
        for path in tracked("*.py", "*.js", "*.html", "*.css")
        if (count := path.read_text("utf-8").count("\n")) > MAX_LINES
    )


def test_every_script_says_what_it_is_for():
    """ruff asks the same of the packages."""
    report(
        f"{name}: has no docstring"
        for name, nodes in code("scripts")
        if len(nodes) > 1 and ast.get_docstring(nodes[0]) is None
    )


def test_one_idea_has_one_word():
    report(
        f"{name}: {identifier}: write {_banned_in(name)[word]} for {word}"
        for name, nodes in code(*PACKAGES, "scripts")
        if not FOREIGN_WORDS.search(name)
        for identifier in sorted(set(identifiers(nodes)))
        for word in sorted(words(identifier) & _banned_in(name).keys())
    )


def _banned_in(name: str) -> dict[str, str]:
    return BANNED | BANNED_IN_DECODING if "/decoding/" in name else BANNED


def test_facts_about_a_model_live_with_that_model():
    report(
        f"{name}:{node.lineno}: {node.value} belongs with its model"
        for name, nodes in code(*PACKAGES, "scripts")
        if not re.search("/openvla/|/model/|/checkpoint/", name)
        for node in nodes
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in MODEL_FACTS
    )


def test_maps_of_anything_end_where_bytes_become_objects():
    for name in UNTYPED_MAPS:
        assert (ROOT / name).is_file(), f"{name} is gone: remove its line from UNTYPED_MAPS"
    report(
        f"{name}:{node.lineno}: {ast.unparse(node)}: use a frozen dataclass, or object for values"
        for name, nodes in code(*PACKAGES)
        if name not in UNTYPED_MAPS
        for node in nodes
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple)
        if re.fullmatch(r"(\w+\.)?(dict|Dict|Mapping)\[str, (typing\.)?Any\]", ast.unparse(node))
    )


def test_no_function_takes_keyword_arguments_to_pass_them_on():
    report(
        f"{name}:{node.lineno}: {node.name}(**{node.args.kwarg.arg}): name the parameters"
        for name, nodes in code(*PACKAGES)
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.args.kwarg is not None
    )


def test_nothing_is_left_for_later():
    marks = re.compile(
        r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b"
    )
    report(
        f"{name}:{number}: {line.strip()}"
        for name, text in texts()
        if not name.endswith(".json")
        for number, line in enumerate(text.splitlines(), 1)
        if marks.search(line) or re.search(r"raise NotImplemented" + "Error", line)
    )


@pytest.mark.parametrize("pattern", [MACHINE_PATHS, REGISTRY_HOSTS], ids=["paths", "hosts"])
def test_nothing_points_to_one_machine_or_one_registry(pattern):
    report(
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    )


def test_the_repository_stays_small_and_holds_no_build_outputs():
    paths = tracked()
    total = sum(path.stat().st_size for path in paths)
    assert total < MAX_TREE_BYTES, f"{total} bytes; find what has no place here"
    rubbish = re.compile(r"(\.pyc|\.log|\.egg-info/.*|\.DS_Store|\.orig|\.rej|\.swp)$|(^|/)wandb/")
    report(name_of(path) for path in paths if rubbish.search(name_of(path)))


@pytest.mark.parametrize("project", ["pyproject.toml", "client/pyproject.toml"])
def test_every_file_of_a_package_is_shipped_with_it(project):
    """A file that no pattern covers works in a checkout and is missing on the robot."""
    described = tomllib.loads((ROOT / project).read_text())
    patterns = described["tool"]["setuptools"]["package-data"]["*"]
    folders = ["client"] if project.startswith("client") else PACKAGES[1:]
    suffixes = {pattern.rpartition("*")[2] for pattern in patterns}
    report(
        f"{name_of(path)}: no pattern of [tool.setuptools.package-data] in {project} covers it"
        for folder in folders
        for path in tracked(f"{folder}/deft_*/**")
        if path.suffix not in {".py", *suffixes} and path.name != "py.typed"
    )


def test_what_to_type_for_libero_names_the_pinned_versions():
    pins = (ROOT / "requirements" / "libero.txt").read_text()
    named = re.findall(r"(bddl|hf-libero|robosuite)==([\d.]+)", HOW_TO_INSTALL)
    assert len(named) == 3
    assert named == re.findall(r"^(bddl|hf-libero|robosuite)==([\d.]+)", pins, re.M)


def test_both_distributions_have_the_same_version_licence_and_typing():
    projects = [
        tomllib.loads((ROOT / name).read_text())["project"]
        for name in ("pyproject.toml", "client/pyproject.toml")
    ]
    for field in ("version", "license", "requires-python"):
        assert projects[0][field] == projects[1][field]
    assert (ROOT / "LICENSE").is_file()
    for package in PACKAGES:
        assert (ROOT / package / f"deft_{package}" / "py.typed").is_file()


def test_no_pin_excludes_what_the_packages_ask_for():
    """Each name in the constraints is there once per Python, and exactly pinned."""
    seen = set()
    for line in (ROOT / "requirements" / "ci.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9_.-]+)==[\w.+!]+( ; .+)?", line)
            assert match, f"not a pin: {line}"
            key = (match[1].lower().replace("_", "-"), match[2])
            assert key not in seen, f"pinned twice: {line}"
            seen.add(key)


def test_the_rules_above_find_what_they_are_for():
    """A check that cannot fail is none."""
    tree = ast.parse("def act(obs, **kwargs):\n    self.oldActionPlan = 32000")
    found = set().union(*(words(name) for name in identifiers(list(ast.walk(tree)))))
    assert {"obs", "action_plan"} <= found
    assert "obs" not in words("observation")
    assert MACHINE_PATHS.search("see /" + "work/main/x")
    assert not MACHINE_PATHS.search("tests/" + "work/x and ./" + "opt/y")
