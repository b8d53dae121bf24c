"""Certificates of a node: files that change, files that cannot be used, and what is refused at the start."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from authority import Authority

from probing.api.errors import ConfigError
from probing.daemon.config import TlsConfig
from probing.daemon.service.auth import check_listen
from probing.daemon.service.outgoing import Outgoing
from probing.daemon.service.tls import Tls
from probing.daemon.supervisor.ports import bind


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("nodes"), "nodes")
    for name in ("n0", "n1"):
        made.node(name)
    return made


@pytest.fixture
def config(tmp_path: Path, nodes: Authority) -> TlsConfig:
    for source, name in (("n0.pem", "cert"), ("n0.key", "key"), ("nodes.pem", "ca")):
        shutil.copy(nodes.directory / source, tmp_path / name)
    return TlsConfig(cert=str(tmp_path / "cert"), key=str(tmp_path / "key"), peer_ca=str(tmp_path / "ca"))


def replace(source: Path, target: Path) -> None:
    shutil.copy(source, target.with_suffix(".new"))
    target.with_suffix(".new").rename(target)


def test_a_pair_counts_once_both_files_are_new(config: TlsConfig, nodes: Authority, tmp_path: Path) -> None:
    tls = Tls(config)
    outgoing = Outgoing(None, tls)
    first, context, key = tls.files(), tls.server(), outgoing.key("10.0.0.1:1")
    replace(nodes.directory / "n1.pem", tmp_path / "cert")
    assert (tls.files(), tls.server(), outgoing.key("10.0.0.1:1")) == (first, context, key)
    replace(nodes.directory / "n1.key", tmp_path / "key")
    assert tls.server() is not context
    assert tls.files()[2] == (nodes.directory / "n1.pem").read_bytes()
    assert outgoing.key("10.0.0.1:1") != key
    assert outgoing.key("unix:/a") == ("unix:/a", "", 0)


def test_a_file_that_is_gone_leaves_the_last_one(
    config: TlsConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Tls(config)
    context = tls.server()
    (tmp_path / "key").unlink()
    assert [tls.server() for _ in range(3)] == [context] * 3
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot read {tmp_path}/key: No such file or directory: the last certificates stay"
    ]


@pytest.mark.parametrize(
    ("name", "text", "mode", "why"),
    [
        ("cert", "nothing", 0o640, "cannot be used"),
        ("key", "nothing", 0o640, "cannot be used"),
        ("key", None, 0o644, "is open to everybody"),
        ("ca", "nothing", 0o640, "has no certificate"),
        ("ca", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----", 0o640, "cannot be used"),
    ],
)
def test_what_cannot_be_used_is_an_error(
    config: TlsConfig, tmp_path: Path, name: str, text: str | None, mode: int, why: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(mode)
    with pytest.raises(ConfigError, match=why) as caught:
        Tls(config)
    assert caught.value.hint


def test_a_certificate_needs_its_key(config: TlsConfig) -> None:
    with pytest.raises(ConfigError, match="both cert and key"):
        Tls(TlsConfig(cert=config.cert))
    assert not Tls(TlsConfig()).wanted


def test_off_loopback_tls_and_someone_to_trust_are_needed() -> None:
    check_listen("0.0.0.0:1", token_file="/t", insecure=False, tls=True)
    check_listen("0.0.0.0:1", token_file="", insecure=False, tls=True, client_ca=True)
    with pytest.raises(ConfigError, match="everybody"):
        check_listen("0.0.0.0:1", token_file="", insecure=False, tls=True)
    with pytest.raises(ConfigError, match="unencrypted"):
        check_listen("0.0.0.0:1", token_file="/t", insecure=False)


def test_a_connection_notices_that_the_other_end_is_gone() -> None:
    with bind(socket.AF_INET, ("127.0.0.1", 0)) as listener:
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_a_certificate_proves_the_names_in_it_but_no_wildcard(
    config: TlsConfig, nodes: Authority, tmp_path: Path
) -> None:
    tls = Tls(config)
    assert tls.names() == {"n0", "localhost"}
    for addresses, names in (("*.example.org,127.0.0.1", set()), ("GN6.example.org,10.0.0.1", {"gn6.example.org"})):
        cert, key = nodes.host("other", addresses)
        replace(Path(cert), tmp_path / "cert")
        replace(Path(key), tmp_path / "key")
        tls.server()
        assert tls.names() == names
    assert Tls(TlsConfig()).names() == frozenset()
