"""What must be true of the files of this repository. Each failure names the file."""

import ast
import re
import tomllib
from collections.abc import Iterator

import pytest
import yaml
from packaging.requirements import Requirement

from deft_libero.simulator.assets import HOW_TO_INSTALL
from tests.repository import PACKAGES, ROOT, code, name_of, texts, tracked

MAX_TREE_BYTES = 80_000_000
PROJECTS = ("pyproject.toml", "client/pyproject.toml")
NOTICE = (ROOT / "NOTICE").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()

# Numbers of OpenVLA's vocabulary. They live with that model, under a name.
MODEL_FACTS = {29871, 31743, 31744, 31745, 31872, 31999, 32000, 32001, 32064}

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


def test_facts_about_a_model_live_with_that_model():
    report(
        f"{name}:{node.lineno}: {node.value} belongs with its model"
        for name, nodes in code(
            "client", "server", "draft_training", "policies/deft_policies/decoding"
        )
        for node in nodes
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in MODEL_FACTS
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


@pytest.mark.parametrize("project", PROJECTS)
def test_every_file_of_a_package_is_shipped_with_it(project):
    """A file that no pattern covers works in a checkout and is missing on the robot."""
    described = tomllib.loads((ROOT / project).read_text())
    patterns = described["tool"]["setuptools"]["package-data"]["*"]
    folders = {
        folder
        for folder in PACKAGES.values()
        if project.startswith("client") == (folder == "client")
    }
    suffixes = {pattern.rpartition("*")[2] for pattern in patterns}
    report(
        f"{name_of(path)}: no pattern of [tool.setuptools.package-data] in {project} covers it"
        for folder in folders
        for path in tracked(f"{folder}/deft_*/**")
        if path.suffix not in {".py", *suffixes} and path.name != "py.typed"
    )


def test_a_test_in_quarantine_says_what_is_known_of_it():
    report(
        f"{name}:{node.lineno}: {node.name} needs a docstring: what fails, what was tried"
        for name, nodes in code("tests")
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and "pytest.mark.quarantine" in map(ast.unparse, node.decorator_list)
        and ast.get_docstring(node) is None
    )


def test_what_to_type_for_libero_names_the_pinned_versions():
    pins = (ROOT / "locks" / "libero.txt").read_text()
    named = re.findall(r"(bddl|hf-libero|robosuite)==([\d.]+)", HOW_TO_INSTALL)
    assert len(named) == 3
    assert named == re.findall(r"^(bddl|hf-libero|robosuite)==([\d.]+)", pins, re.M)


def test_who_cites_the_project_names_its_version_and_licence():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])


def test_files_that_the_notice_names_exist():
    named = re.findall(r"(?:server|client|policies|examples|docs|tests)/[\w./*-]*[\w]", NOTICE)
    assert len(named) > 15
    report(f"NOTICE: {name}" for name in named if not list(ROOT.glob(name)))


def test_the_notice_names_every_folder_of_golden_files_from_others():
    """What Deft itself wrote needs no mention."""
    ours = {"black_box", "evaluation_folder", "tiny_openvla", "wire_v1"}
    folders = [path for path in (ROOT / "tests/golden").iterdir() if path.is_dir()]
    others = [name_of(path) for path in folders if path.name not in ours]
    report(f"NOTICE does not name {name}" for name in others if name not in NOTICE)


def test_both_distributions_have_the_same_version_licence_and_typing():
    projects = [tomllib.loads((ROOT / name).read_text())["project"] for name in PROJECTS]
    for field in ("version", "license", "requires-python"):
        assert projects[0][field] == projects[1][field]
    assert (ROOT / "LICENSE").is_file()
    for package, folder in PACKAGES.items():
        assert (ROOT / folder / package / "py.typed").is_file()


def needed_by(project):
    """What a distribution asks for, with its extras, as requirements by name."""
    described = tomllib.loads((ROOT / project).read_text())["project"]
    extras = described.get("optional-dependencies", {})
    texts = [*described["dependencies"], *(text for each in extras.values() for text in each)]
    return {one.name: one.specifier for one in map(Requirement, texts)}


def test_the_server_asks_for_the_client_of_its_own_version():
    """It imports what no promise covers, so that no other version is known to fit."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert str(needed_by("pyproject.toml")["deft-client"]) == f"=={version}"


def test_a_library_whose_private_parts_are_used_has_an_upper_bound():
    """Renamed, they would be missing silently: limits of connections."""
    inside = {"prometheus-client", "uvicorn", "websockets"}
    pins = (ROOT / "locks" / "all.txt").read_text()
    tested = dict(re.findall(r"^([\w-]+)==([\w.]+)", pins, re.M))
    needed = {name: one for name, one in needed_by("pyproject.toml").items() if name in inside}
    assert len(needed) == 3
    for name, specifier in needed.items():
        assert any(one.operator == "<" for one in specifier), f"{name}{specifier} has no bound"
        assert specifier.contains(tested[name]), f"{name} {tested[name]} is what is tested"


def test_no_pin_excludes_what_the_packages_ask_for():
    """Each name in the constraints is there once per platform, and exactly pinned."""
    seen = set()
    for line in (ROOT / "locks" / "all.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9_.-]+)==[\w.+!]+( ; .+)?", line)
            assert match, f"not a pin: {line}"
            key = (match[1].lower().replace("_", "-"), match[2])
            assert key not in seen, f"pinned twice: {line}"
            seen.add(key)


@pytest.mark.parametrize("project", PROJECTS)
def test_the_lock_has_what_the_packages_ask_for(project):
    text = (ROOT / "locks" / "all.txt").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.M))
    asked = {name: one for name, one in needed_by(project).items() if name != "deft-client"}
    names = {name: name.lower().replace("_", "-") for name in asked}
    report(f"{name}: not in the lock" for name in asked if names[name] not in pins)
    report(
        f"{name}{one}: the lock has {pins[names[name]]}"
        for name, one in asked.items()
        if not one.contains(pins[names[name]])
    )


def test_locks_name_no_package_index():
    for path in (ROOT / "locks").iterdir():
        assert "://" not in path.read_text(), path.name
        assert "index-url" not in path.read_text(), path.name


def test_the_search_for_paths_finds_what_it_is_for():
    assert MACHINE_PATHS.search("see /" + "work/main/x")
    assert not MACHINE_PATHS.search("tests/" + "work/x and ./" + "opt/y")


def test_what_mistakes_are_planted_in_exists():
    for path in sorted((ROOT / "tests/mutants").glob("*.toml")):
        settings = tomllib.loads(path.read_text())["cosmic-ray"]
        tests = [word for word in settings["test-command"].split() if word.startswith("tests/")]
        assert tests
        for name in (*settings["module-path"], *tests):
            assert (ROOT / name).exists(), name


def steps_of_workflows():
    """Name of the file and text of every step that a workflow or an action of ours has."""
    for path in tracked(".github/workflows/*.yml", ".github/actions/*.yml"):
        described = yaml.safe_load(path.read_text())
        for job in described.get("jobs", {"": described.get("runs")}).values():
            for step in job["steps"]:
                yield name_of(path), step.get("run") or step["uses"]


def targets_of_make():
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", MAKEFILE, re.M))


def missing_in(step):
    """Targets, programs and actions of ours that a step names and that do not exist."""
    for line in step.splitlines():
        words = line.split()
        if words[:1] == ["make"]:
            yield from {one for one in words[1:] if "=" not in one} - targets_of_make()
    files = re.findall(r"(?<![\w/])(?:\./)?(\.(?:ci|github)/[\w./-]+)", step)
    yield from (name for name in files if not (ROOT / name).exists())


def test_what_workflows_call_exists():
    steps = list(steps_of_workflows())
    assert {"make check", "make test", "make test-all", "make test-docs", "make release"} <= {
        step for _, step in steps
    }
    report(f"{name}: no {one}" for name, step in steps for one in missing_in(step))


def test_the_search_in_workflows_finds_what_it_is_for():
    assert list(missing_in("make no-such-target WORKERS=2")) == ["no-such-target"]
    assert list(missing_in("sudo .ci/no-such-program")) == [".ci/no-such-program"]
    assert list(missing_in("./.github/actions/none")) == [".github/actions/none"]


def test_files_that_make_names_exist():
    named = re.findall(r"(?<![\w.$/-])((?:tests|locks|\.ci)/[\w./-]+)", MAKEFILE)
    assert len(named) >= 5
    report(f"Makefile: no {name}" for name in named if not (ROOT / name).exists())


def test_python_is_tested_as_far_as_it_is_promised():
    """Oldest and newest as classifiers, ruff, make and the workflow have them."""
    projects = [tomllib.loads((ROOT / name).read_text()) for name in PROJECTS]
    checks = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())
    tested = checks["jobs"]["test"]["strategy"]["matrix"]["python"]
    for described in projects:
        named = re.findall(r":: (3\.\d+)'", str(described["project"]["classifiers"]))
        assert named == tested
        assert described["project"]["requires-python"] == f">={tested[0]}"
    assert projects[0]["tool"]["ruff"]["target-version"] == f"py{tested[0]}".replace(".", "")
    assert f"({tested[0].replace('.', ', ')})" in MAKEFILE
