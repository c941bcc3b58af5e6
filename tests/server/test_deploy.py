"""The compose file, the images and the dashboard agree with each other and with the program."""

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from deft_policies.constant import ConstantPolicy
from deft_server.app import create_app
from deft_server.settings import Settings

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
LONG_RUNNING = {"server", "server-cpu", "server-ray", "prometheus", "grafana"}


class Strict(BaseModel):
    """Part of a compose file, as far as ours goes; anything else is a typing error."""

    model_config = ConfigDict(extra="forbid")


class Build(Strict):
    context: Literal["."]
    target: str
    args: dict[str, str] = {}


class Healthcheck(Strict):
    test: list[str]
    interval: str
    timeout: str
    retries: int
    start_period: str = "0s"


class Dependency(Strict):
    condition: Literal["service_healthy"]


class Service(Strict):
    image: str
    user: str
    build: Build | None = None
    profiles: list[str] = []
    command: list[str] = []
    environment: dict[str, str] = {}
    ports: list[str] = []
    volumes: list[str] = []
    tmpfs: list[str] = []
    read_only: Literal[True]
    cap_drop: list[Literal["ALL"]]
    security_opt: list[str]
    restart: str
    shm_size: str = ""
    stop_grace_period: str = ""
    healthcheck: Healthcheck | None = None
    depends_on: dict[str, Dependency] = {}
    deploy: dict[str, object] = {}


class Compose(Strict):
    services: dict[str, Service]
    volumes: dict[str, dict[str, str]]
    hardened: dict[str, object] = Field(alias="x-hardened")
    server: dict[str, object] = Field(alias="x-server")
    libero: dict[str, object] = Field(alias="x-libero")


@pytest.fixture(scope="module")
def compose() -> Compose:
    return Compose.model_validate(yaml.safe_load((ROOT / "docker-compose.yml").read_text()))


def test_every_service_is_pinned_and_nobody_is_root(compose: Compose) -> None:
    for name, service in compose.services.items():
        assert re.search(r":v?\d+\.\d+", service.image), name
        assert not service.user.startswith(("0", "root")), name


def test_who_stays_up_says_how_it_is(compose: Compose) -> None:
    healthy = {name for name, service in compose.services.items() if service.healthcheck}
    assert healthy == LONG_RUNNING
    for service in compose.services.values():
        assert set(service.depends_on) <= healthy


def test_every_named_volume_is_declared(compose: Compose) -> None:
    used = {
        mount.split(":")[0]
        for service in compose.services.values()
        for mount in service.volumes
        if not mount.startswith((".", "/", "$"))
    }
    assert used == set(compose.volumes)


def test_files_mounted_into_containers_exist(compose: Compose) -> None:
    for service in compose.services.values():
        for mount in service.volumes:
            if mount.startswith("./"):
                assert (ROOT / mount.split(":")[0]).exists(), mount


def test_servers_are_reached_from_this_machine_only_unless_told_otherwise(
    compose: Compose,
) -> None:
    for service in compose.services.values():
        for port in service.ports:
            assert port.startswith(("127.0.0.1:", "${DEFT_BIND:-127.0.0.1}:")), port


@pytest.mark.parametrize("name", ["server", "server-cpu", "server-ray", "libero", "libero-gpu"])
def test_commands_use_flags_that_exist(
    compose: Compose, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    service = compose.services[name]
    module = "deft_server" if name.startswith("server") else "deft_client"
    policy = [flag for flag in service.command if flag.startswith("--policy")]
    with pytest.raises(SystemExit):
        import_module(f"{module}.__main__").main([service.command[0], *policy, "--help"])
    helped = capsys.readouterr().out
    for flag in service.command[1:]:
        if flag.startswith("--"):
            assert flag.split("=")[0] in helped, flag


def stages() -> dict[str, str]:
    """The text of each stage of the Dockerfile, by name."""
    parts = re.split(r"^FROM \S+ AS (\w+)$", DOCKERFILE, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_targets_of_the_compose_file_exist_and_do_not_run_as_root(compose: Compose) -> None:
    wanted = {one.build.target for one in compose.services.values() if one.build}
    assert wanted <= set(stages())
    for name, text in stages().items():
        assert ("USER 10001:10001" in text) == (name != "base"), name


def test_the_client_image_has_no_torch() -> None:
    assert "torch" not in stages()["client"]
    assert "torch" not in stages()["base"]


def test_what_the_images_copy_exists_and_reaches_the_builder() -> None:
    let_in = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source in let_in, source


def test_the_example_environment_names_every_variable_that_must_be_set() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    example = (ROOT / ".env.example").read_text()
    required = set(re.findall(r"\$\{(\w+):\?", text))
    assert required == {"DEFT_CHECKPOINT", "GRAFANA_PASSWORD"}
    for name in required:
        assert re.search(rf"^{name}=\S", example, re.MULTILINE), name
    for name in re.findall(r"^(\w+)=", example, re.MULTILINE):
        assert f"${{{name}" in text, name


def test_prometheus_asks_the_servers_of_the_compose_file(compose: Compose) -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    targets = config["scrape_configs"][0]["static_configs"][0]["targets"]
    assert set(targets) == {f"{name}:8000" for name in compose.services if "server" in name}


def test_grafana_is_provisioned_with_what_is_mounted(compose: Compose) -> None:
    folder = ROOT / "deploy/grafana/provisioning"
    source = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((folder / "dashboards/deft.yml").read_text())["providers"][0]
    path = provider["options"]["path"]
    mounts = [mount.split(":")[1] for mount in compose.services["grafana"].volumes]
    assert path in mounts
    home = compose.services["grafana"].environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{path}/deft.json"


def test_the_dashboard_is_what_its_script_builds() -> None:
    path = ROOT / "deploy/grafana/build_dashboard.py"
    spec = importlib.util.spec_from_file_location("build_dashboard", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert json.loads(script.TARGET.read_text()) == json.loads(json.dumps(script.build()))


def queries() -> Iterator[str]:
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/deft.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def test_every_metric_and_label_of_the_dashboard_is_one_the_server_has(tmp_path: Path) -> None:
    settings = Settings(record=tmp_path)
    service = create_app(ConstantPolicy(), settings).service
    families = list(service.metrics.registry.collect())
    exported = {"process_resident_memory_bytes"}
    for family in families:
        endings = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_sum", "_count"),
        }.get(family.type, ("",))
        exported |= {family.name + ending for ending in endings}
    named = {name for one in queries() for name in re.findall(r"\b(?:deft|process)_\w+", one)}
    assert named - exported == set()
    ours = {family.name for family in families if family.name.startswith("deft_")}
    shown = {name for name in ours if any(name in one for one in queries())}
    assert ours - shown == {"deft_recorded_steps"}, "a metric that nobody sees"


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="needs docker-compose")
def test_compose_itself_accepts_the_file() -> None:
    config = ["docker-compose", "--env-file", str(ROOT / ".env.example"), "config"]
    accepted = subprocess.run(config, cwd=ROOT, capture_output=True, text=True, check=False)
    assert accepted.returncode == 0, accepted.stderr
    assert "/checkpoints/openvla-7b" in accepted.stdout
