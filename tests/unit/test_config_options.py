"""The configuration: files, command lines, and the messages about mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tomllib
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import ConfigError
from probing.daemon.config import Config, StoreConfig, options, shown

ROOT = Path(__file__).resolve().parents[2]


def load(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "probingd.toml"
    file.write_text(text)
    return Config.load(file)


def test_defaults_are_those_of_the_design() -> None:
    config = Config.from_args([])
    assert config.state_dir == "/var/lib/probingd"
    assert config.socket == "/run/probingd/probingd.sock"
    assert config.runtime_dir == "/run/probingd/probingd.sock.d"
    assert config.pin_dir == "/sys/fs/bpf/probingd/default"
    assert config.node_name


def test_file_then_command_line(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('node_name = "a"\n[store]\nmax_bytes = 100_000_000\nmax_age_days = 2\n')
    config = Config.from_args([f"--config={file}", "--node-name", "b", "--cluster.seeds=unix:/p,h:1"])
    assert config.node_name == "b"
    assert config.store == StoreConfig(max_bytes=100_000_000, max_age_days=2.0)
    assert config.cluster.seeds == ("unix:/p", "h:1")


names = st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True)
paths = st.from_regex(r"/[a-zA-Z0-9 ._=-]{1,30}", fullmatch=True)


@given(
    node=names,
    state=paths,
    insecure=st.booleans(),
    size=st.integers(16 << 20, 1 << 40),
    age=st.floats(0.05, 1e6),
    peers=st.lists(st.builds("{}:{}".format, names, st.integers(0, 65535)), max_size=4),
)
def test_a_child_gets_what_its_parent_has(
    node: str, state: str, insecure: bool, size: int, age: float, peers: list[str]
) -> None:
    options = {"node_name": node, "state_dir": state, "insecure": str(insecure).lower()}
    options |= {"store.max_bytes": size, "store.max_age_days": age, "cluster.seeds": ",".join(peers)}
    config = Config.from_args([f"--{key}={value}" for key, value in options.items()])
    assert Config.from_args(config.to_args()) == config


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[store]\nmax_byte = 5\n", "unknown configuration key 'store.max_byte'", "did you mean store.max_bytes?"),
        ("max_bytes = 5\n", "unknown configuration key 'max_bytes'", "did you mean store.max_bytes?"),
        ("[stor]\nmax_bytes = 5\n", "unknown configuration key 'stor'", "did you mean [store]?"),
        ("zzzzzzzz = 5\n", "unknown configuration key 'zzzzzzzz'", "docs/config.md lists the keys"),
        ("[store\n", "is not TOML", "docs/config.md"),
        ('[store]\nmax_bytes = "5"\n', "store.max_bytes = '5' is wrong", "a whole number"),
        ("[store]\nmax_bytes = true\n", "store.max_bytes = 'True' is wrong", "a whole number"),
        ("[store]\nmax_bytes = 5\n", "store.max_bytes = '5' is wrong", "at least 16777216"),
        ("[store]\nmax_age_days = nan\n", "store.max_age_days = 'nan' is wrong", "at least 0.05"),
        ("[store]\nmax_age_days = 0\n", "store.max_age_days = '0.0' is wrong", "at least 0.05"),
        ("insecure = 1\n", "insecure = '1' is wrong", "true or false"),
        ("store = 1\n", "unknown configuration key 'store'", "did you mean [store]?"),
        ('instance = "a/b"\n', "instance = 'a/b' is wrong", "letters, digits"),
        ('node_name = "a b"\n', "node_name = 'a b' is wrong", "letters, digits"),
        ('listen = "7077"\n', "listen = '7077' is wrong", "HOST:PORT"),
        ('listen = "h:70777"\n', "listen = 'h:70777' is wrong", "HOST:PORT"),
        ('[cluster]\nseeds = "h:1"\n', "cluster.seeds = 'h:1' is wrong", "a list of texts"),
        ('[cluster]\nseeds = ["dns:h"]\n', "cluster.seeds = 'h' is wrong", "HOST:PORT"),
        ('[cluster]\nlabels = ["rack r7"]\n', "cluster.labels = 'rack r7' is wrong", "KEY=VALUE"),
        ('[cluster]\nlabels = ["a=1", "a=2"]\n', "cluster.labels = 'a=1, a=2' is wrong", "different keys"),
        ("[cluster]\nfailed_s = 2.0\n", "cluster.suspect_s = '2.0' is wrong", "below cluster.failed_s"),
        ('[users]\ncollector = "a b"\n', "users.collector = 'a b' is wrong", "a name or a number"),
        ('[diagnose]\nhook = "page me"\n', "diagnose.hook = 'page me' is wrong", "an absolute path"),
        ("[diagnose]\nhook = '/bin/page \"me'\n", "is wrong", "an absolute path"),
        ('[diagnose]\nwebhook = "file:///etc/passwd"\n', "diagnose.webhook", "an http or https URL"),
        ('[diagnose]\nwebhook = "http://h/a b"\n', "diagnose.webhook", "an http or https URL"),
        (f'socket = "/{"x" * 100}"\n', "is wrong", "a path of at most 84 bytes"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--store.max_byte=1"], "unknown configuration key 'store.max_byte'"),
        (["--query.workers=two"], "query.workers = 'two' is wrong"),
        (["--insecure=maybe"], "insecure = 'maybe' is wrong"),
        (["--listen"], "--listen needs a value"),
        (["stray"], "unexpected argument 'stray'"),
        (["--config=/nowhere/at/all.toml"], "no configuration file /nowhere/at/all.toml"),
        (["--config=/"], "cannot read /"),
    ],
)
def test_mistakes_on_the_command_line(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_args(args)
    assert message in caught.value.message
    assert caught.value.hint


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigError, match="is not TOML"):
        Config.load(tmp_path / "c")


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        load(tmp_path, "#" * (1 << 20) + "\n")


def test_ipv6_and_unix_prefix() -> None:
    config = Config.from_args(["--listen=[::1]:7077", "--socket=unix:/run/p.sock"])
    assert (config.listen, config.socket) == ("[::1]:7077", "/run/p.sock")


def test_nothing_can_be_changed() -> None:
    with pytest.raises(AttributeError):
        Config.from_args([]).insecure = True  # type: ignore[misc]


def test_the_page_and_the_shipped_file_list_every_option() -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    rows = {m[1]: (m[2], m[3]) for m in re.finditer(r"^\| `(\S+)` \| `(.*)` \| (.*) \|$", page, re.M)}
    shipped = (ROOT / "packaging" / "probingd.toml").read_text()
    assert not tomllib.loads(shipped).get("store"), "all keys are comments"
    uncommented = tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", shipped, flags=re.M))
    assert set(rows) == {key for key, _ in options()}
    for key, option in options():
        default = list(option.default) if isinstance(option.default, tuple) else option.default
        written, doc = rows[key]
        assert (json.loads(written), doc) == (default, option.doc)
        value: object = uncommented
        for name in key.split("."):
            assert isinstance(value, dict)
            value = value[name]
        assert value == default


def test_readers_see_every_option_but_no_secret() -> None:
    secret = "https://hooks.example.com/T0/secret"
    given = (f"--diagnose.webhook={secret}", "--diagnose.hook=/bin/page --key secret", "--store.max_bytes=99999999")
    config = Config.from_args(given)
    rows = {row["key"]: row for row in shown(config)}
    assert rows.keys() == {key for key, _ in options()}
    assert (rows["store.max_bytes"]["value"], rows["store.max_bytes"]["default"]) == ("99999999", str(10 << 30))
    assert (rows["diagnose.hook"]["value"], rows["diagnose.webhook"]["value"]) == ("(set)", "(set)")
    assert rows["flight"]["value"] == "false"
    assert not [row for row in rows.values() if "secret" in row["value"]]
    assert {row["value"] for row in shown(Config.from_args([])) if row["key"] == "diagnose.hook"} == {""}
