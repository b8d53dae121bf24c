"""A listener that speaks as NCCL's RAS does (src/ras/client_support.cc), in a process of its own or in a thread.

``python ras_listener.py ADDRESS PORT MANNER [FILE]`` prints ``ready PORT`` and serves until it is killed. FILE is the
report. Manners: ``json`` (2.28.7 and later), ``text`` (before: it knows no ``SET FORMAT``), and some that no NCCL has:
``mute`` greets nobody, ``stranger`` is another service, ``endless`` never ends its report, ``slow`` gives a byte of it
at a time, ``gone`` closes the connection after the greeting, ``chatty`` greets with a line that does not end.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from pathlib import Path

__all__ = ("MANNERS", "RasListener")

MANNERS = ("json", "text", "mute", "stranger", "endless", "slow", "gone", "chatty")


class RasListener:
    """Listens on ``address``:``port`` (0: any) and may share it, as ranks do. ``asked`` are the lines it was sent."""

    def __init__(self, report: bytes, manner: str = "json", address: str = "127.0.0.1", port: int = 0) -> None:
        self.asked: list[str] = []
        self.connections = 0
        self._report = report
        self._manner = manner
        self._over = threading.Event()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((address, port))
        self._socket.listen(64)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)

    def wait(self) -> None:
        self._thread.join()

    def _accept(self) -> None:
        clients = []
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                break
            self.connections += 1
            clients.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
            clients[-1].start()
        for thread in clients:
            thread.join(10)

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(0.1)
            pending = b""
            while not self._over.is_set():
                try:
                    part = client.recv(1024)
                except TimeoutError:
                    continue
                if not part:
                    return
                pending += part
                *lines, pending = pending.split(b"\n")
                for line in lines:
                    if not self._answer(client, line.decode(errors="replace").rstrip("\r")):
                        return

    def _answer(self, client: socket.socket, line: str) -> bool:
        """False when the connection is over."""
        self.asked.append(line)
        command = line.lower()
        if self._manner == "mute":
            return True
        if self._manner in ("stranger", "chatty"):
            client.sendall(b"HTTP/1.1 400 Bad Request\n" if self._manner == "stranger" else b"SERVER " * 1000)
            return True
        if command.startswith("client protocol "):
            client.sendall(b"SERVER PROTOCOL 2\n")
            return self._manner != "gone"
        if command.startswith("timeout "):
            client.sendall(b"OK\n")
        elif command.startswith("set format ") and self._manner != "text":
            client.sendall(b"OK\n" if command[11:] in ("json", "text") else b"ERROR: Invalid format\n")
        elif command in ("status", "verbose status"):
            self._tell(client)
            return False
        else:
            client.sendall(f"ERROR: Unknown command {line}\n".encode())
        return True

    def _tell(self, client: socket.socket) -> None:
        if self._manner == "endless":
            while not self._over.is_set():
                client.sendall(b" " * 65_536)
        elif self._manner == "slow":
            for byte in self._report:
                client.sendall(bytes([byte]))
                if self._over.wait(0.05):
                    return
        else:
            client.sendall(self._report)


def main(address: str, port: str, manner: str, file: str = "") -> None:
    report = Path(file).read_bytes() if file else b""
    listener = RasListener(report, manner, address, int(port))
    print(f"ready {listener.port}", flush=True)
    listener.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
