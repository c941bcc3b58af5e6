"""The files for Ray and Kubernetes are of the right shape, and agree with each other and with us.

The shapes are written out here as far as our files go; anything else in them is an error.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from deft_policies.constant import ConstantPolicy
from deft_policies.families.options import read_flags
from deft_server.app import create_app
from deft_server.commands.settings_sources import policy_of_flags
from deft_server.replicas import ray_serve
from deft_server.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
Quantity = Annotated[str, Field(pattern=r"^\d+(Gi|Mi|m)?$")]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ActorOptions(Part):
    num_cpus: float
    num_gpus: float


class ServeDeployment(Part):
    name: Literal["PolicyReplica"]
    num_replicas: int
    max_ongoing_requests: Literal[8]
    graceful_shutdown_wait_loop_s: float
    graceful_shutdown_timeout_s: float
    health_check_period_s: float
    ray_actor_options: ActorOptions


class ServeApplication(Part):
    name: Literal["deft"]
    route_prefix: None
    import_path: str
    args: dict[str, str]
    deployments: list[ServeDeployment]


class ServeConfig(Part):
    proxy_location: Literal["Disabled", "HeadOnly"]
    applications: list[ServeApplication]


class Variable(Part):
    name: str
    value: str | None = None
    valueFrom: dict[Literal["secretKeyRef"], dict[str, str]] | None = None


class ContainerPort(Part):
    containerPort: int
    name: Name


class HttpGet(Part):
    path: str
    port: str


class Exec(Part):
    command: list[str]


class Probe(Part):
    httpGet: HttpGet | None = None
    exec: Exec | None = None
    initialDelaySeconds: int = 0
    timeoutSeconds: int = 1
    periodSeconds: int
    failureThreshold: int


class Resources(Part):
    requests: dict[str, Quantity] = {}
    limits: dict[str, Quantity] = {}


class Mount(Part):
    name: Name
    mountPath: str
    readOnly: Literal[True]


class Container(Part):
    name: Name
    image: str
    args: list[str] = []
    env: list[Variable]
    ports: list[ContainerPort] = []
    lifecycle: dict[Literal["preStop"], dict[Literal["exec"], Exec]] = {}
    startupProbe: Probe | None = None
    readinessProbe: Probe | None = None
    livenessProbe: Probe | None = None
    resources: Resources
    volumeMounts: list[Mount] = []


class Volume(Part):
    name: Name
    secret: dict[str, str] | None = None
    persistentVolumeClaim: dict[str, str] | None = None


class PodSpec(Part):
    containers: list[Container]
    volumes: list[Volume] = []
    terminationGracePeriodSeconds: int = 30
    securityContext: dict[str, int | bool] = {}


class Metadata(Part):
    name: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Pod(Part):
    metadata: Metadata = Metadata()
    spec: PodSpec


class HeadGroup(Part):
    rayStartParams: dict[str, str]
    template: Pod


class WorkerGroup(HeadGroup):
    groupName: Name
    replicas: int
    minReplicas: int
    maxReplicas: int


class RayClusterConfig(Part):
    rayVersion: str
    authOptions: dict[str, str]
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


class RayServiceSpec(Part):
    serveConfigV2: str
    rayClusterConfig: RayClusterConfig


class RayService(Part):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: RayServiceSpec


class FrontSpec(Part):
    replicas: int
    strategy: dict[str, dict[str, int]]
    selector: dict[str, dict[str, str]]
    template: Pod


class FrontDeployment(Part):
    apiVersion: Literal["apps/v1"]
    kind: Literal["Deployment"]
    metadata: Metadata
    spec: FrontSpec


class Rule(Part):
    alert: str
    expr: str
    for_: str = Field(default="0s", alias="for")
    labels: dict[str, str]
    annotations: dict[str, str]


class RuleGroup(Part):
    name: str
    rules: list[Rule]


class RuleFile(Part):
    groups: list[RuleGroup]


@pytest.fixture
def serve_config() -> ServeConfig:
    return ServeConfig.model_validate(yaml.safe_load((DEPLOY / "ray/serve.yaml").read_text()))


@pytest.fixture
def ray_service() -> RayService:
    text = (DEPLOY / "kubernetes/rayservice.yaml").read_text()
    return RayService.model_validate(yaml.safe_load(text))


@pytest.fixture
def front() -> FrontDeployment:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/front.yaml").read_text()))
    assert [one["kind"] for one in documents] == ["Deployment", "Service", "PodDisruptionBudget"]
    for other in documents[1:]:
        selector = other["spec"]["selector"]
        labels = selector.get("matchLabels", selector)
        assert labels == documents[0]["spec"]["template"]["metadata"]["labels"]
    assert documents[1]["spec"]["sessionAffinity"] == "ClientIP"
    return FrontDeployment.model_validate(documents[0])


def test_what_serve_is_told_to_import_is_our_application(serve_config: ServeConfig) -> None:
    (application,) = serve_config.applications
    module, _, function = application.import_path.partition(":")
    assert module == ray_serve.__name__
    assert callable(getattr(ray_serve, function))
    assert application.name == ray_serve.APPLICATION
    assert application.deployments[0].name == ray_serve.DEPLOYMENT


def test_the_documented_scaling_is_that_of_the_flags() -> None:
    text = (DEPLOY.parent / "docs/scaling.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    documented = yaml.safe_load(block)["autoscaling_config"]
    assert documented == ray_serve.scaling(2, 8)
    module, _, function = documented["policy"]["policy_function"].partition(":")
    assert getattr(import_module(module), function) is ray_serve.replicas_wanted


def test_the_flags_in_the_configuration_are_those_of_the_policy(serve_config: ServeConfig) -> None:
    given = dict(serve_config.applications[0].args)
    assert given.pop("version")
    flags = read_flags(policy_of_flags(given).namespace)
    assert flags.checkpoint == given["checkpoint"]
    assert flags.statistics_key == given["statistics_key"]


def test_a_policy_is_loaded_from_a_table_of_its_flags() -> None:
    policy = policy_of_flags({"policy": "sleeping", "sleep_ms": "20"}).load()
    assert isinstance(policy, ConstantPolicy)
    assert policy.sleep_s == 0.02


def test_kuberay_deploys_what_serve_deploys(
    ray_service: RayService, serve_config: ServeConfig
) -> None:
    config = ServeConfig.model_validate(yaml.safe_load(ray_service.spec.serveConfigV2))
    assert config.applications == serve_config.applications
    wanted = config.applications[0].deployments[0]
    (group,) = ray_service.spec.rayClusterConfig.workerGroupSpecs
    limits = group.template.spec.containers[0].resources.limits
    assert wanted.num_replicas * wanted.ray_actor_options.num_gpus <= group.replicas * int(
        limits["nvidia.com/gpu"]
    )
    assert group.minReplicas <= group.replicas <= group.maxReplicas


def test_every_process_of_the_cluster_serves_for_latency(
    ray_service: RayService, front: FrontDeployment
) -> None:
    cluster = ray_service.spec.rayClusterConfig
    pods = [cluster.headGroupSpec.template, cluster.workerGroupSpecs[0].template]
    for pod in [*pods, front.spec.template]:
        (container,) = pod.spec.containers
        environment = {one.name: one.value for one in container.env}
        assert environment.items() >= ray_serve.ENVIRONMENT.items()
        assert container.image == "deft/server-ray:0.1.0"
        mounted = {one.name for one in container.volumeMounts}
        assert mounted == {one.name for one in pod.spec.volumes}


def test_the_fronts_have_the_token_of_the_cluster(
    ray_service: RayService, front: FrontDeployment
) -> None:
    asked = ray_service.spec.rayClusterConfig.authOptions
    environment = {one.name: one for one in front.spec.template.spec.containers[0].env}
    assert environment["RAY_AUTH_MODE"].value == asked["mode"]
    secret = {"name": asked["secretName"], "key": "auth_token"}
    assert environment["RAY_AUTH_TOKEN"].valueFrom == {"secretKeyRef": secret}


def test_the_front_uses_flags_and_probes_that_exist(front: FrontDeployment) -> None:
    (container,) = front.spec.template.spec.containers
    command, *flags = container.args
    assert command == "serve"
    names = {flag.partition("=")[0].removeprefix("--").replace("-", "_") for flag in flags}
    assert names <= set(Settings.model_fields)
    assert front.spec.template.spec.securityContext["runAsNonRoot"] is True
    drain_s = next(float(flag.partition("=")[2]) for flag in flags if "drain" in flag)
    sleep, pause_s = container.lifecycle["preStop"]["exec"].command
    assert sleep == "sleep"
    assert front.spec.template.spec.terminationGracePeriodSeconds > drain_s + float(pause_s)
    routes = {getattr(route, "path", "") for route in create_app(ConstantPolicy()).routes}
    for probe in (container.startupProbe, container.readinessProbe, container.livenessProbe):
        assert probe is not None
        assert probe.httpGet is not None
        assert probe.httpGet.path in create_app(ConstantPolicy()).openapi()["paths"] or (
            probe.httpGet.path in routes
        )


def test_the_rules_speak_of_metrics_that_exist(tmp_path: Path) -> None:
    rules = RuleFile.model_validate(yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text()))
    page = create_app(ConstantPolicy(), Settings(record=tmp_path)).service.metrics.page().decode()
    families = set(re.findall(r"^# TYPE (\w+)", page, re.M))
    for rule in rules.groups[0].rules:
        for metric in re.findall(r"\bdeft_\w+", rule.expr):
            assert {metric, re.sub("_(bucket|sum|count)$", "", metric)} & families, metric
        assert rule.labels["severity"] in {"page", "warn"}
        assert rule.annotations["summary"]


def test_the_probes_of_ray_call_what_the_image_has(ray_service: RayService) -> None:
    """KubeRay's own call wget."""
    cluster = ray_service.spec.rayClusterConfig
    for pod in (cluster.headGroupSpec.template, cluster.workerGroupSpecs[0].template):
        (container,) = pod.spec.containers
        for probe in (container.livenessProbe, container.readinessProbe):
            assert probe is not None
            assert probe.exec is not None
            program, flag, code = probe.exec.command
            assert (program, flag) == ("python", "-c")
            compile(code, "probe", "exec")


def test_images_with_and_without_cuda_have_other_names(ray_service: RayService) -> None:
    compose = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())
    built = {one["image"] for one in compose["services"].values() if "TORCH_INDEX" in str(one)}
    cluster = ray_service.spec.rayClusterConfig
    (worker,) = cluster.workerGroupSpecs[0].template.spec.containers
    assert worker.image not in built
