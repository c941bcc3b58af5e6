"""The compose file, the images and the dashboard agree with each other and with the program."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from argparse import ArgumentParser
from collections.abc import Iterator
from configparser import ConfigParser
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from deft_policies.commands.parse import PolicyCommand
from deft_policies.constant import ConstantPolicy
from deft_server.app import create_app
from deft_server.commands.serve import ExitCode
from deft_server.commands.settings_sources import read_command
from deft_server.settings import Settings, SettingsError
from tests.server.certificates import make_certificate

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
LONG_RUNNING = {"server", "server-cpu", "server-ray", "proxy", "prometheus", "grafana"}


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
    entrypoint: list[str] = []
    environment: dict[str, str] = {}
    ports: list[str] = []
    networks: dict[Literal["default"], dict[Literal["ipv4_address"], str]] = {}
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
    networks: dict[Literal["default"], object]
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


def test_no_service_asks_for_the_variables_of_another(compose: Compose) -> None:
    """Compose refuses the whole file where one service needs a variable that nobody gave."""
    assert ":?" not in (ROOT / "docker-compose.yml").read_text()
    shell, flag, script = compose.services["grafana"].entrypoint
    words = [shell, flag, script.replace("$$", "$").replace("/run.sh", "true")]
    for password, code in (("", 1), ("secret", 0)):
        environment = {"PATH": os.environ["PATH"], "GF_SECURITY_ADMIN_PASSWORD": password}
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert done.returncode == code
        assert ("GRAFANA_PASSWORD" in done.stderr) == (not password)


def test_services_that_stay_up_have_a_health_check_and_wait_for_healthy_ones(
    compose: Compose,
) -> None:
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


def test_servers_listen_on_this_machine_unless_told_otherwise(
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


def test_the_server_image_run_as_it_is_lets_nobody_in_without_a_key() -> None:
    """`docker run --publish` opened a robot to whoever reached the port."""
    (words,) = re.findall(r"^CMD (.+)$", stages()["server"], re.MULTILINE)
    command, *flags = json.loads(words)
    assert command == "serve"
    with pytest.raises(SettingsError, match="give keys_file"):
        read_command(ArgumentParser(), flags, {})
    given = {"DEFT_SERVER_KEYS_FILE": "/config/keys.toml"}
    _, settings = read_command(ArgumentParser(), flags, given)
    assert settings.host == "0.0.0.0"


def test_an_edit_of_the_client_does_not_download_torch_anew() -> None:
    """A layer is built again where one before it has changed."""
    assert "COPY client" not in stages()["base"]
    assert stages()["server"].index("torch\n") < stages()["server"].index("COPY client")
    for name in ("client", "libero"):
        assert stages()[name].index("COPY client") < stages()[name].index("./client")


def test_what_the_images_copy_exists_and_reaches_the_builder() -> None:
    let_in = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source in let_in, source


def test_the_example_names_every_setting_that_services_need() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    example = (ROOT / ".env.example").read_text()
    assert not re.findall(r"\$\{(\w+):\?", text), "compose would ask whatever is started"
    for name in ("DEFT_CHECKPOINT", "GRAFANA_PASSWORD"):
        assert re.search(rf"^{name}=", example, re.MULTILINE), name
    assert re.search(r"^GRAFANA_PASSWORD=$", example, re.MULTILINE), "a secret has no default"
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


def test_a_server_is_configured_by_the_environment_alone(compose: Compose) -> None:
    """Keys, TLS, statistics key, head, quantisation and recording, as .env would give them."""
    values = {
        "DEFT_SERVER_POLICY_OPTIONS": "--statistics-key libero_object "
        "--draft-head /checkpoints/head --quantization int8",
        "DEFT_SERVER_KEYS_FILE": "/config/keys.toml",
        "DEFT_SERVER_TLS_CERTIFICATE": "/config/server.crt",
        "DEFT_SERVER_TLS_KEY": "/config/server.key",
        "DEFT_SERVER_RECORD": "",
    }
    policy, settings = settings_of(compose.services["server-cpu"], values)
    given = policy.namespace
    assert (given.statistics_key, given.quantization) == ("libero_object", "int8")
    assert given.draft_heads == [Path("/checkpoints/head")]
    assert settings.keys_file == Path("/config/keys.toml")
    assert settings.tls_key == Path("/config/server.key")
    assert settings.record is None
    assert settings_of(compose.services["server-cpu"], {})[1].record == Path("/recordings")


def settings_of(service: Service, values: dict[str, str]) -> tuple[PolicyCommand, Settings]:
    """What the program reads in the container, where compose fills in the variables like this."""

    def fill(found: re.Match[str]) -> str:
        name, separator, default = found.groups()
        value = values.get(name)
        return default if value is None or (separator == ":-" and not value) else value

    environment = {
        name: re.sub(r"\$\{(\w+)(:?-)([^}]*)\}", fill, text)
        for name, text in service.environment.items()
    }
    return read_command(ArgumentParser(), service.command[1:], environment)


def test_a_server_that_cannot_start_is_not_tried_for_ever(compose: Compose) -> None:
    for name in ("server", "server-cpu"):
        assert compose.services[name].restart == "on-failure:5"


def test_systemd_restarts_the_server_where_that_helps(
    tmp_path: Path,
) -> None:
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(ROOT / "deploy" / "systemd" / "deft.service")
    service = unit["Service"]
    program, command, *flags = service["ExecStart"].split()
    assert (Path(program).name, command) == ("deft", "serve")
    config = tmp_path / "deft.toml"
    config.write_text('policy = "constant"\n')
    given = [str(config) if one == "/etc/deft/deft.toml" else one for one in flags]
    _, settings = read_command(ArgumentParser(allow_abbrev=False), given, {})
    assert float(service["TimeoutStopSec"]) > settings.drain_s
    assert service["Restart"] == "on-failure"
    hopeless = set(map(int, service["RestartPreventExitStatus"].split()))
    assert hopeless == {ExitCode.BAD_SETTINGS, ExitCode.POLICY_BROKEN}


def test_alerts_are_loaded_and_each_says_what_it_is(compose: Compose) -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    mounted = [mount.split(":")[1] for mount in compose.services["prometheus"].volumes]
    assert {f"/etc/prometheus/{name}" for name in config["rule_files"]} <= set(mounted)
    for rule in alerts():
        assert rule["labels"]["severity"] in ("page", "warn")
        assert rule["annotations"]["summary"]


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    return list(group["rules"])


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
    asked = [*queries(), *(rule["expr"] for rule in alerts())]
    named = {name for one in asked for name in re.findall(r"\b(?:deft|process)_\w+", one)}
    assert named - exported == set()
    ours = {family.name for family in families if family.name.startswith("deft_")}
    shown = {name for name in ours if any(name in one for one in queries())}
    assert ours == shown, "a metric that nobody sees"


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="needs docker-compose")
def test_compose_itself_accepts_the_file() -> None:
    config = ["docker-compose", "--env-file", str(ROOT / ".env.example"), "config"]
    environment = {**os.environ, "GRAFANA_PASSWORD": "of this test"}
    accepted = subprocess.run(
        config, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert accepted.returncode == 0, accepted.stderr
    assert "/checkpoints/openvla-7b" in accepted.stdout


def test_the_proxy_starts_before_the_server_whose_name_it_looks_up_again(
    compose: Compose,
) -> None:
    """nginx refuses to start with a name that nobody knows, unless it is to be looked up later."""
    template = (ROOT / "deploy/nginx/upstream.conf.template").read_text()
    assert re.search(r"server \$\{DEFT_UPSTREAM\}:8000 resolve;", template)
    assert "resolver 127.0.0.11" in template
    version = re.search(r":(\d+)\.(\d+)\.(\d+)", compose.services["proxy"].image)
    assert version is not None
    assert tuple(map(int, version.groups())) >= (1, 27, 3)
    assert not compose.services["proxy"].depends_on


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Prometheus)")
def test_prometheus_accepts_what_its_configuration_says_of_tls_and_keys(tmp_path: Path) -> None:
    folder = ROOT / "deploy/prometheus"
    shutil.copy(folder / "alerts.yml", tmp_path)
    shutil.copy(make_certificate(tmp_path)[0], tmp_path / "deft-ca.crt")
    (tmp_path / "deft-key").touch()
    text = (folder / "prometheus.yml").read_text().replace("/etc/prometheus", str(tmp_path))
    text = re.sub(r"# (scheme|tls_config|authorization):", r"\1:", text)
    (tmp_path / "prometheus.yml").write_text(text)
    checked = subprocess.run(
        ["promtool", "check", "config", tmp_path / "prometheus.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    assert all(f"\n    {name}:" in text for name in ("scheme", "tls_config", "authorization"))
