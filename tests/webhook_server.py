"""``webhook_server.py ADDRESS FILE``: appends the body of each POST to FILE as a line; prints its port."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

MOST_BYTES = 4 << 20


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(min(int(self.headers["Content-Length"]), MOST_BYTES))
        with Path(sys.argv[2]).open("ab") as file:
            file.write(body.replace(b"\n", b" ") + b"\n")
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = HTTPServer((sys.argv[1], 0), _Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
