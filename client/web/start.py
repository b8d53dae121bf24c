"""Starts the server of the page: for the caller on loopback, or for a team with TLS and a login."""

from __future__ import annotations

import ipaddress
import os
import secrets
import shutil
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape as as_html
from pathlib import Path

from cryptography import x509

from probing.api.errors import UsageError
from probing.api.text import escape
from probing.client.cluster import Cluster
from probing.client.settings import Settings
from probing.client.user import user_name
from probing.client.web.app import Site, application
from probing.client.web.panels import Panels
from probing.client.web.peers import anybody, callers_alone
from probing.client.web.server import WebServer
from probing.client.web.visitors import KeyDoor, Sessions, TokenDoor
from probing.client.wire.credentials import Tls

__all__ = ("serve_caller", "serve_team", "signs_for_caller")

_PORT = 7088
_BACKLOG = 128
_LOOPBACK = ("127.0.0.1", "localhost", "[[]::1]")
# The file that leads a browser to the page is deleted after this time, s.
_FILE_S = 60.0


def serve_caller(settings: Settings, panels: Panels, posted: Panels, port: int | None, *, browser: bool) -> None:
    """Serves the caller until Ctrl-C. A visitor needs the printed key; ``callers_alone`` decides who may connect."""
    sock = _bound_to_loopback(port)
    number = sock.getsockname()[1]
    key = secrets.token_urlsafe(24)
    cookie, signs = f"probing_{number}", signs_for_caller()
    site = Site(_target(settings), settings.all_nodes, user_name(), _LOOPBACK, cookie, secure=False, signs=signs)
    app = application(site, Sessions(KeyDoor(_cluster(settings, settings.token), key)), panels, posted)
    server = WebServer(app, sock, callers_alone, None)
    address = f"http://127.0.0.1:{number}/?key={key}"
    _say(address, number)
    with _browser(address) if browser and _has_display() else _nothing():
        server.run()


def serve_team(
    settings: Settings, panels: Panels, posted: Panels, listen: str, cert: Path | None, key: Path | None
) -> None:
    """Serves visitors who log in with a token that the target accepts, until SIGTERM.

    Raises UsageError for an address beyond loopback without a certificate, and for a target that asks for no token.
    """
    host, port = _host_and_port(listen)
    if any(address.startswith("unix:") for address in (settings.target, *settings.nodes)):
        hint = "name the TCP port of the node: probingctl -t 127.0.0.1:7077 web --listen ..."
        raise UsageError("a Unix socket asks for no token: each visitor would have your own rights", hint=hint)
    if settings.token:
        raise UsageError("with --listen each visitor brings a token", hint="leave --token-file and --token out")
    tls, names = None, list(_LOOPBACK)
    if cert is not None and key is not None:
        tls, names = _tls(cert, key), [*_names(cert), *([] if _unspecified(host) else [_bracketed(host)])]
    elif not _is_loopback(host):
        hint = "give --cert FILE and --key FILE; packaging/test-ca.sh makes them for a trial"
        raise UsageError(f"tokens would travel in the clear to {listen}", hint=hint)
    sock = _listening(host, port)
    number = sock.getsockname()[1]
    cookie = f"probing_{number}" if tls is None else "__Host-probing"
    site = Site(_target(settings), settings.all_nodes, "", tuple(names), cookie, secure=tls is not None)
    app = application(
        site, Sessions(TokenDoor(lambda token: _cluster(settings, token, tcp_alone=True))), panels, posted
    )
    sys.stdout.write(f"serving {'https' if tls else 'http'}://{_bracketed(host)}:{number}/\n")
    sys.stdout.flush()
    WebServer(app, sock, anybody, tls).run()


def signs_for_caller() -> bool:
    """Returns whether the page that ``serve_caller`` serves may sign requests with the key of the user who runs the
    server. It may not under sudo, because then another user may connect.
    """
    return "SUDO_UID" not in os.environ


def _cluster(settings: Settings, token: str, *, tcp_alone: bool = False) -> Cluster:
    return Cluster(
        settings.target,
        nodes=settings.nodes,
        all_nodes=settings.all_nodes,
        where=settings.where,
        token=token,
        tls=Tls(*settings.tls) if settings.tls is not None else None,
        timeout=settings.timeout,
        tcp_alone=tcp_alone,
    )


def _target(settings: Settings) -> str:
    return ", ".join(settings.nodes) or settings.target


def _say(address: str, port: int) -> None:
    lines = [f"the page is at {address}", "Ctrl-C ends it. Whoever has this address sees what you may see."]
    if connection := os.environ.get("SSH_CONNECTION", "").split():
        server = connection[2] if len(connection) == 4 else socket.gethostname()
        user = os.environ.get("SUDO_USER") or user_name()
        tunnel = f"ssh -N -L {port}:127.0.0.1:{port} {user}@{server}"
        lines.insert(1, f"from your own machine, first: {tunnel}")
    sys.stdout.write("".join(escape(line) + "\n" for line in lines))
    sys.stdout.flush()


def _has_display() -> bool:
    """Returns whether a browser can be opened for the caller. Over ssh it cannot, because ssh may forward the display;
    nor under sudo, where the browser would have root's rights.
    """
    elsewhere = "SSH_CONNECTION" in os.environ or "SUDO_UID" in os.environ
    return not elsewhere and any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


@contextmanager
def _browser(address: str) -> Iterator[None]:
    """Opens a browser at a private file that leads to ``address``, because all users can see a browser's arguments in
    the list of processes."""
    import webbrowser

    folder = Path(tempfile.mkdtemp(prefix="probingctl-web-"))
    page = folder / "open.html"
    page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={as_html(address)}">')
    remove = threading.Timer(_FILE_S, lambda: shutil.rmtree(folder, ignore_errors=True))
    remove.daemon = True
    remove.start()
    threading.Thread(target=webbrowser.open, args=(page.as_uri(),), name="browser", daemon=True).start()
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _bound_to_loopback(port: int | None) -> socket.socket:
    """Returns a socket at 127.0.0.1 and ``port``; None: the usual port, or a free port if the usual port is in use."""
    try:
        return _listening("127.0.0.1", _PORT if port is None else port)
    except UsageError:
        if port is not None:
            raise
        return _listening("127.0.0.1", 0)


def _listening(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at the address. Raises UsageError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as e:
        sock.close()
        raise UsageError(
            f"cannot listen on {_bracketed(host)}:{port}: {e.strerror or e}", hint="name another port"
        ) from None
    return sock


def _host_and_port(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise UsageError(f"--listen {listen} is not an address", hint="for example 0.0.0.0:7443")
    return host.strip("[]"), int(port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _tls(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key)
    except OSError as e:
        raise UsageError(
            f"cannot use {cert} and {key}: {e.strerror or e}", hint="both must be PEM, and belong together"
        ) from None
    return context


def _names(cert: Path) -> list[str]:
    """Returns the names by which browsers accept the certificate, as patterns for the Host header."""
    own = x509.load_pem_x509_certificates(cert.read_bytes())[0]
    try:
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise UsageError(f"{cert} has no name: browsers refuse it", hint="it needs a subjectAltName") from None
    hosts = [name.lower() for name in names.get_values_for_type(x509.DNSName)]
    return [*hosts, *(_bracketed(str(address)) for address in names.get_values_for_type(x509.IPAddress))]
