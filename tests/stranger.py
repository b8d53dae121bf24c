"""A user of the machine who is none of ours: takes ports where it can, and writes down what it is shown."""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType

__all__ = ("UID", "Impostor", "bind_attempts")

UID = 65534
_AS = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--inh-caps=-all", "--no-new-privs"]
# Each way to listen where connections to 127.0.0.1 would arrive.
_BIND = """
import json, socket, sys
port, taken = int(sys.argv[1]), []
for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::ffff:127.0.0.1"),
                     (socket.AF_INET6, "::")):
    for options in ((), ("SO_REUSEADDR",), ("SO_REUSEPORT",), ("SO_REUSEADDR", "SO_REUSEPORT"), ("SO_BINDTODEVICE",)):
        with socket.socket(family) as sock:
            try:
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                for name in options:
                    value = b"lo" if name == "SO_BINDTODEVICE" else 1
                    sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
                sock.bind((host, port))
                sock.listen()
                taken.append([host, *options])
            except OSError:
                continue
print(json.dumps(taken))
"""
# A gRPC server that answers nothing and shows the metadata of each call.
_SERVE = """
import json, sys, grpc
from concurrent.futures import ThreadPoolExecutor
class Show(grpc.GenericRpcHandler):
    def service(self, details):
        print(json.dumps([details.method, [list(map(str, pair)) for pair in details.invocation_metadata]]), flush=True)
server = grpc.server(ThreadPoolExecutor(2), handlers=(Show(),), options=(("grpc.so_reuseport", 0),))
print(server.add_insecure_port(sys.argv[1]), flush=True)
server.start()
sys.stdin.read()
"""


def bind_attempts(port: int) -> list[list[str]]:
    """Returns the ways in which a stranger can listen on ``port`` of loopback now."""
    words = [*_AS, sys.executable, "-I", "-c", _BIND, str(port)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    found: list[list[str]] = json.loads(done.stdout)
    return found


class Impostor:
    """A stranger's gRPC server at ``address``, HOST:PORT. ``user``: another user than UID."""

    def __init__(self, address: str, user: int = UID) -> None:
        words = [word.replace(str(UID), str(user)) for word in _AS]
        self._process = subprocess.Popen(
            [*words, sys.executable, "-I", "-c", _SERVE, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line.isdigit(), line
        self.port = int(line)

    def __enter__(self) -> Impostor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> list[tuple[str, dict[str, str]]]:
        """Ends it; returns method and metadata of each call that it was sent."""
        output, _ = self._process.communicate("", timeout=30)
        return [(method, dict(pairs)) for method, pairs in map(json.loads, output.splitlines())]
