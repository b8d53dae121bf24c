"""The Helm chart: Helm renders it, Kubernetes' schemas check the objects, the daemon checks its configuration."""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from helm_child import Helm, HelmRefusal
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples, long_unless

from probing.daemon.config import Config
from probing.daemon.service.auth import check_listen
from probing.daemon.supervisor.rights import CAPABILITIES, COLLECTOR

kubernetes = pytest.importorskip("kubernetes_validate")
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("helm_python"), reason="Helm is built for x86-64")

ROOT = Path(__file__).resolve().parents[3]
PACKAGING = ROOT / "packaging"
CHART = PACKAGING / "helm" / "probingd"
MANIFEST = PACKAGING / "kubernetes" / "probingd.yaml"
# The oldest that Chart.yaml admits, and the newest that the package of schemas has.
VERSIONS = ("1.30", "1.37")

TLS_SECRET: dict[str, Any] = {"tls": {"secretName": "nodes"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "configured": {
        "config": {
            "hang_s": 60,
            "store": {"max_bytes": 53687091200, "table_max_bytes": ["python.samples=2000000000"]},
            "cluster": {"labels": ["rack=r7", "rail=2"]},
        },
        "state": {"hostPath": "/data/probingd"},
        "socket": {"hostPath": "/run/probingd"},
        "keepProbes": True,
    },
    "token and TLS": {"listen": {"enabled": True, "flight": True}, "token": {"secretName": "tokens"}, **TLS_SECRET},
    "certificates": {
        "listen": {"enabled": True},
        "tls": {"volume": {"csi": {"driver": "csi.cert-manager.io", "readOnly": True}}, "clientCa": "people.crt"},
    },
    "metrics": {
        "metrics": {"enabled": True, "port": 9999, "serviceMonitor": {"enabled": True, "labels": {"release": "p"}}},
        "token": {"value": "0123456789abcdef0123456789abcdef"},
        **TLS_SECRET,
    },
    "insecure": {"listen": {"enabled": True}, "metrics": {"enabled": True}, "insecure": True},
    "own network": {
        "hostNetwork": False,
        "listen": {"enabled": True},
        "metrics": {"enabled": True},
        "insecure": True,
        "networkPolicy": {
            "enabled": True,
            "from": [{"namespaceSelector": {}}],
            "metricsFrom": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
        },
    },
    "everything else": {
        "image": {"repository": "registry.example/probingd", "digest": f"sha256:{'a' * 64}", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "pull"}],
        "nameOverride": "watcher",
        "nvidia": {"enabled": True},
        "extraCapabilities": ["SYS_ADMIN"],
        "priorityClass": {"create": False, "name": "system-node-critical"},
        "updateStrategy": {"type": "OnDelete", "rollingUpdate": None},
        "serviceAccount": {"annotations": {"a": "b"}},
        "affinity": {"nodeAffinity": {}},
        "tolerations": [{"operator": "Exists"}],
        "seLinuxOptions": {"type": "spc_t"},
        "podLabels": {"team": "infra"},
        "podAnnotations": {"b": "c"},
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraVolumes": [{"name": "p", "configMap": {"name": "probes"}}],
        "extraVolumeMounts": [{"name": "p", "mountPath": "/etc/probingd/probes.d"}],
        "resources": {"limits": {"cpu": 2}},
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a key that is not known": ({"listn": {"enabled": True}}, "listn"),
    "an option that is not known": ({"config": {"store": {"max_byte": 1}}}, "max_byte"),
    "an option that the chart sets": ({"config": {"listen": "0.0.0.0:7077"}}, "listen"),
    "a size as text": ({"config": {"store": {"max_bytes": "50G"}}}, "max_bytes"),
    "a size below the least": ({"config": {"store": {"max_bytes": 1000}}}, "max_bytes"),
    "a port above all": ({"listen": {"port": 70000}}, "port"),
    "a relative directory": ({"state": {"hostPath": "var/lib/probingd"}}, "hostPath"),
    "a socket elsewhere": ({"socket": {"hostPath": "/run/other"}}, "hostPath"),
    "a capability by its long name": ({"extraCapabilities": ["CAP_SYS_ADMIN"]}, "extraCapabilities"),
    "all capabilities": ({"extraCapabilities": ["ALL"]}, "extraCapabilities"),
    "a token that is short": ({"token": {"value": "secret"}}, "token"),
    "a key outside of its Secret": ({"token": {"key": "../../etc/shadow"}}, "key"),
    "a boolean as text": ({"hostNetwork": "true"}, "hostNetwork"),
    "open to all": ({"listen": {"enabled": True}}, "would answer everybody"),
    "a token in the clear": ({"metrics": {"enabled": True}, "token": {"secretName": "t"}}, "in the clear"),
    "TLS without a token": ({"listen": {"enabled": True}, **TLS_SECRET}, "would answer everybody"),
    "two tokens": ({"token": {"secretName": "t", "value": "0123456789abcdef"}}, "exclude each other"),
    "two certificates": ({"tls": {"secretName": "t", "volume": {"csi": {}}}}, "exclude each other"),
    "a policy without effect": ({"networkPolicy": {"enabled": True}}, "no effect"),
    "a monitor of nothing": ({"metrics": {"serviceMonitor": {"enabled": True}}}, "metrics.enabled"),
}


@functools.cache
def helm() -> Helm:
    return Helm()


@pytest.fixture(scope="module", autouse=True)
def _helm_ends() -> Iterator[None]:
    yield
    if helm.cache_info().currsize:
        helm().close()
        helm.cache_clear()


@functools.cache
def manifest(values: str, release: str) -> str:
    return helm().manifest(json.loads(values), release, "watch")


def objects(values: dict[str, Any], release: str = "probingd") -> list[dict[str, Any]]:
    text = manifest(json.dumps(values), release)
    return [found for found in yaml.load_all(text, yaml.CSafeLoader) if found]


def of_kind(values: dict[str, Any], kind: str) -> dict[str, Any]:
    (found,) = [each for each in objects(values) if each["kind"] == kind]
    return found


def pod(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = of_kind(values, "DaemonSet")["spec"]["template"]["spec"]
    return found


def config_of(values: dict[str, Any], tmp_path: Path) -> Config:
    """The configuration with which the pod's daemon would start."""
    file = tmp_path / "probingd.toml"
    file.write_text(of_kind(values, "ConfigMap")["data"]["probingd.toml"])
    known = {"NODE_NAME": "gn6", "POD_IP": "10.0.0.6"}
    run, *words = pod(values)["containers"][0]["args"]
    assert run == "run"
    return Config.from_args([f"--config={file}", *(re.sub(r"\$\((\w+)\)", lambda m: known[m[1]], w) for w in words)])


@pytest.mark.parametrize("name", VARIANTS)
def test_helm_finds_no_fault(name: str) -> None:
    report = helm().lint(VARIANTS[name])
    # 1: a chart could have an icon.
    assert [message for message in report["messages"] if message["severity"] > 1] == []
    assert report["errors"] == []


@pytest.mark.parametrize(
    ("name", "version"),
    [
        long_unless(version == VERSIONS[0] or name == "everything else", name, version)
        for name in VARIANTS
        for version in VERSIONS
    ],
)
def test_kubernetes_knows_every_field(name: str, version: str) -> None:
    found = objects(VARIANTS[name], release="r-1")
    for each in found:
        if each["apiVersion"] != "monitoring.coreos.com/v1":
            kubernetes.validate(each, version, strict=True)
        assert each["metadata"].get("namespace") == (None if each["kind"] == "PriorityClass" else "watch")
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_daemon_accepts_its_configuration(name: str, tmp_path: Path) -> None:
    config = config_of(VARIANTS[name], tmp_path)
    assert config.node_name == "gn6"
    for address in filter(None, (config.listen, config.http)):
        check_listen(
            address,
            token_file=config.token_file,
            insecure=config.insecure,
            tls=bool(config.tls.cert),
            client_ca=bool(config.tls.client_ca),
        )
    wanted = VARIANTS[name].get("config", {}).get("store", {}).get("max_bytes", Config().store.max_bytes)
    assert config.store.max_bytes == wanted
    assert config.host.kernel_log == ""


@pytest.mark.parametrize("name", VARIANTS)
def test_files_that_the_daemon_is_given_are_mounted(name: str, tmp_path: Path) -> None:
    config, spec = config_of(VARIANTS[name], tmp_path), pod(VARIANTS[name])
    mounts = {Path(each["mountPath"]): each["name"] for each in spec["containers"][0]["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in spec["volumes"]}
    files = (config.token_file, config.tls.cert, config.tls.key, config.tls.client_ca, config.tls.peer_ca)
    used = [config.state_dir, config.socket, config.probes.bpffs, *filter(None, files)]
    assert [path for path in used if not mounts.keys() & set(Path(path).parents) | {Path(path)} & mounts.keys()] == []


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_values_are_refused(name: str) -> None:
    values, words = REFUSED[name]
    with pytest.raises(HelmRefusal, match=re.escape(words)):
        objects(values)


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20), max_size=3),
    size=st.integers(16 << 20, 1 << 53),
    age=st.floats(0.05, 1e6),
    switch=st.booleans(),
)
@settings(max_examples=examples(25), deadline=None)
def test_values_reach_the_daemon_as_they_are(texts: list[str], size: int, age: float, switch: bool) -> None:
    store = {"max_bytes": size, "max_age_days": age}
    config = {"store": store, "probes": {"fuse": switch}, "logs": {"patterns": texts}}
    read = tomllib.loads(of_kind({"config": config}, "ConfigMap")["data"]["probingd.toml"])
    assert read == {**config, "host": {"kernel_log": ""}}


def test_a_changed_configuration_starts_new_pods() -> None:
    def annotations(values: dict[str, Any]) -> Any:
        return of_kind(values, "DaemonSet")["spec"]["template"]["metadata"]["annotations"]

    assert annotations({}) == annotations({})
    assert annotations({}) != annotations({"config": {"sampling": {"hz": 7}}})


def test_the_container_has_no_more_than_it_needs() -> None:
    spec = pod({})
    assert spec["hostPID"] is True
    assert spec["automountServiceAccountToken"] is False
    context = spec["containers"][0]["securityContext"]
    assert context["privileged"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"]["drop"] == ["ALL"]
    # Those of rights.py that every kernel needs, and what a supervisor that is root does to processes of others.
    given_to_children = set(CAPABILITIES) - {"SYS_ADMIN", "SYSLOG"}
    assert set(context["capabilities"]["add"]) == given_to_children | {"FOWNER", "DAC_OVERRIDE", "KILL"}
    assert set(COLLECTOR) < given_to_children
    read_only = {each["name"] for each in spec["containers"][0]["volumeMounts"] if each.get("readOnly")}
    assert read_only == {"cgroup", "config"}


def test_the_users_of_the_image_read_the_secrets() -> None:
    steps = (PACKAGING / "container" / "install.sh").read_text()
    ids = {words[-1]: words for line in steps.splitlines() if (words := shlex.split(line)) and words[0] == "groupadd"}
    spec = pod(VARIANTS["token and TLS"])
    assert str(spec["securityContext"]["fsGroup"]) == ids["probing-service"][2]
    modes = {volume["name"]: volume["secret"]["defaultMode"] for volume in spec["volumes"] if "secret" in volume}
    # Readable by the group, not open to others: the daemon refuses such files.
    assert modes == {"token": 0o440, "tls": 0o440}


def test_a_token_becomes_a_secret() -> None:
    values = VARIANTS["metrics"]
    secret, monitor = of_kind(values, "Secret"), of_kind(values, "ServiceMonitor")
    assert base64.b64decode(secret["data"]["token"]).decode() == values["token"]["value"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": secret["metadata"]["name"], "key": "token"}
    assert endpoint["scheme"] == "https"
    ports = {port["name"] for port in of_kind(values, "Service")["spec"]["ports"]}
    assert endpoint["port"] in ports
    assert monitor["metadata"]["labels"]["release"] == "p"


def test_what_is_made_of_the_chart_is_up_to_date() -> None:
    assert (CHART / "values.schema.json").read_text() == helm().schema(), "run `make kubernetes`"
    made = MANIFEST.read_text()
    assert re.sub(r"^(#.*\n)+", "", made) == helm().manifest({}), "run `make kubernetes`"


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_the_schema_knows_every_value() -> None:
    """Whoever adds a value adds it to the schema, where a typo would else pass."""
    known = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert set(helm().defaults()) == set(known) - {"global"}


def test_the_namespace_admits_the_pods() -> None:
    (namespace,) = yaml.safe_load_all((PACKAGING / "kubernetes" / "namespace.yaml").read_text())
    kubernetes.validate(namespace, VERSIONS[-1], strict=True)
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"
    made = yaml.safe_load_all(MANIFEST.read_text())
    assert {each["metadata"].get("namespace", "probingd") for each in made} == {namespace["metadata"]["name"]}
