"""``tcp_peer.py ADDRESS [PORT]``: listens, or connects to PORT; then sends as many bytes as each line of stdin says,
and closes the connection for a negative number.

What arrives is read and thrown away.
"""

import contextlib
import socket
import sys
import threading

if len(sys.argv) == 2:
    listener = socket.socket()
    listener.bind((sys.argv[1], 0))
    listener.listen(1)
    print("listens", listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    listener.close()
else:
    connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    print("connected", connection.getsockname()[1], flush=True)


def drop() -> None:
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16):
            pass


threading.Thread(target=drop, daemon=True).start()
for line in sys.stdin:
    if int(line) < 0:
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    else:
        connection.sendall(bytes(int(line)))
