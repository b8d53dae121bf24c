"""``probingctl web`` as a process: for its caller, and with --listen for a team of which each has a token."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from authority import Authority
from client_fake_node import FakeNode, process
from waiting import until
from web_scene import Page

from probing.api.errors import Unauthenticated
from probing.api.proto.probing.v1 import node_pb2 as pb

Run = Callable[..., tuple[int, str, str]]
_PROGRAM = "from probing.client.main import main; main()"
_PLACE = ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION", "SUDO_UID")
ALICE, BOB = "alice-" + "a" * 20, "bob-" + "b" * 20


class TokenNode(FakeNode):
    """A node that takes two tokens."""

    taken = (f"Bearer {ALICE}", f"Bearer {BOB}")

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        shown = dict(context.invocation_metadata()).get("authorization", "")
        self.metadata.append({"authorization": shown})
        if shown not in self.taken:
            self._abort(context, Unauthenticated("the token is wrong"))
        return super().Status(request, context)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[TokenNode]:
    tables = {"process.processes": [process("alpha", 0, 1000)]}
    with TokenNode(tmp_path, "alpha", tables, tcp="127.0.0.1:0") as made:
        yield made


@contextmanager
def started(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Runs the command; yields the process and the lines that it printed until it served."""
    own = {name: text for name, text in os.environ.items() if name not in _PLACE}
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**own, "PYTHONUNBUFFERED": "1", **environment},
    ) as made:
        try:
            assert made.stdout is not None
            lines = []
            for line in made.stdout:
                lines.append(line.rstrip("\n"))
                if line.startswith(("Ctrl-C", "serving")):
                    break
            assert lines, made.stderr and made.stderr.read()
            yield made, lines
        finally:
            made.kill()


def test_the_caller_gets_an_address_with_a_key_and_ctrl_c_ends_it(node: TokenNode) -> None:
    with started("-t", node.address, "--token", ALICE, "web", "--port", "0") as (made, lines):
        address = re.fullmatch(r"the page is at http://127\.0\.0\.1:(\d+)/\?key=([\w-]{32})", lines[0])
        assert address is not None
        page = Page(int(address[1]))
        assert page.enter(address[2]).status == 303
        assert [row["rank"] for row in page.ask("/api/ps").data] == [0]
        session = page.ask("/api/session").json
        assert (session["target"], session["login_needed"]) == (node.address, False)
        made.send_signal(signal.SIGINT)
        assert made.wait(30) == 0
        assert made.stderr is not None
        assert "Traceback" not in made.stderr.read()


def test_over_ssh_the_line_of_the_tunnel_is_printed(node: TokenNode) -> None:
    with started("-t", node.address, "web", "--port", "0", SSH_CONNECTION="10.0.0.9 5555 10.0.0.7 22") as (_, lines):
        port = re.findall(r":(\d+)/", lines[0])[0]
        assert re.fullmatch(
            rf"from your own machine, first: ssh -N -L {port}:127\.0\.0\.1:{port} \S+@10\.0\.0\.7", lines[1]
        )


def test_a_browser_is_led_to_the_page_by_a_file_of_the_caller(node: TokenNode, tmp_path: Path) -> None:
    browser, shown = tmp_path / "browser", tmp_path / "shown"
    browser.write_text(
        "#!/bin/sh\nfile=${1#file://}\n"
        f'{{ echo "$@"; stat -c %a "$(dirname "$file")"; cat "$file"; }} >{shown}.new\n'
        f"mv {shown}.new {shown}\n"
    )
    browser.chmod(0o755)
    with started("-t", node.address, "web", "--port", "0", DISPLAY=":9", BROWSER=str(browser)) as (made, lines):
        until(shown.exists)
        arguments, mode, page = shown.read_text().split("\n", 2)
        address = lines[0].removeprefix("the page is at ")
        assert address in page
        # All users see the arguments of a process.
        assert address.partition("key=")[2] not in arguments
        assert mode == "700"
        made.send_signal(signal.SIGINT)
        made.wait(30)
        assert not Path(arguments.removeprefix("file://")).exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-t", "unix:/x", "web", "--listen", "127.0.0.1:0"), "a Unix socket asks for no token"),
        (("-t", "127.0.0.1:1", "web", "--listen", "0.0.0.0:7443"), "tokens would travel in the clear"),
        (("-t", "127.0.0.1:1", "--token", ALICE, "web", "--listen", "127.0.0.1:0"), "each visitor brings a token"),
        (("-t", "127.0.0.1:1", "web", "--listen", "here"), "is not an address"),
        (("web", "--cert", "a", "--key", "b"), "need --listen"),
        (("web", "--listen", "127.0.0.1:0", "--port", "1"), "exclude each other"),
        (
            ("-t", "127.0.0.1:1", "web", "--listen", "127.0.0.1:0", "--cert", "/x", "--key", "/y"),
            "cannot use /x and /y",
        ),
    ],
)
def test_what_would_be_unsafe_is_refused(ctl: Run, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = ctl(*arguments)
    assert code == 2
    assert message in err
    assert "hint: " in err


def test_a_team_logs_in_and_each_asks_with_the_token_shown(node: TokenNode, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.host("page")
    arguments = ("-t", f"127.0.0.1:{node.port}", "web", "--listen", "127.0.0.1:0", "--cert", cert, "--key", key)
    with started(*arguments) as (_, lines):
        port = int(re.findall(r"serving https://127\.0\.0\.1:(\d+)/", lines[0])[0])
        trusting = ssl.create_default_context(cafile=authority.file)
        alice, bob, stranger = (Page(port, trusting) for _ in range(3))
        assert stranger.ask("/api/session").json["login"] == "token"
        assert stranger.log_in("wrong-" + "x" * 20).status == 401
        assert stranger.log_in("short").status == 401
        assert stranger.ask("/api/ps").status == 401
        answer = alice.log_in(ALICE)
        assert answer.headers["set-cookie"].startswith("__Host-probing=")
        flags = {part.strip().lower() for part in answer.headers["set-cookie"].split(";")[1:]}
        assert {"httponly", "secure", "samesite=strict", "path=/"} <= flags
        assert ALICE not in str(answer.headers)
        assert bob.log_in(BOB).status == 200
        node.metadata.clear()
        assert alice.ask("/api/ps").status == 200
        assert {one["authorization"] for one in node.metadata} == {f"Bearer {ALICE}"}
        node.metadata.clear()
        assert bob.ask("/api/ps").status == 200
        assert {one["authorization"] for one in node.metadata} == {f"Bearer {BOB}"}
        alice.ask("/api/logout", {})
        assert alice.ask("/api/ps").status == 401
        assert bob.ask("/api/ps").status == 200
        # A token that is taken back: the node refuses, and the page says so.
        node.refused = Unauthenticated("the token is wrong")
        assert bob.ask("/api/status").status in (401, 502)


def test_a_node_that_names_a_unix_socket_is_not_asked_there(node: TokenNode, tmp_path: Path) -> None:
    with FakeNode(tmp_path, "beta", {"process.processes": [process("beta", 1, 1001)]}) as other:
        # A node that was taken over may name any path: the page must not ask there with rights of its own.
        node.peers = [
            pb.Peer(node="alpha", address=f"127.0.0.1:{node.port}", state="healthy"),
            pb.Peer(node="beta", address=other.address, state="healthy"),
        ]
        with started("-t", f"127.0.0.1:{node.port}", "web", "--all-nodes", "--listen", "127.0.0.1:0") as (_, lines):
            page = Page(int(re.findall(r":(\d+)/", lines[0])[0]))
            assert page.log_in(ALICE).status == 200
            answer = page.ask("/api/ps").json
        assert [row["node"] for row in answer["data"]] == ["alpha"]
        (failure,) = answer["contract"]["failures"]
        assert failure == {"node": "beta", "error": "only its Unix socket is known"}
        assert other.asked == []


def test_the_page_takes_no_older_tls(node: TokenNode, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.host("page")
    arguments = ("-t", f"127.0.0.1:{node.port}", "web", "--listen", "127.0.0.1:0", "--cert", cert, "--key", key)
    with started(*arguments) as (_, lines):
        port = int(re.findall(r":(\d+)/", lines[0])[0])
        old = ssl.create_default_context(cafile=authority.file)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            Page(port, old).ask("/")
        assert Page(port, ssl.create_default_context(cafile=authority.file)).ask("/").status == 200
