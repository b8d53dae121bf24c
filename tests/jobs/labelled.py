"""A rank that labels itself: commands on stdin, ``done`` after each.

``steps N``; ``send SOCKET JSON``; ``publish KEY=VALUE...`` in the process context of OpenTelemetry.
"""

import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from otel_context import Context, resource


def evaluate():
    return sys.stdin.readline()


def main():
    dist.init_process_group("gloo")
    context = None
    while line := evaluate():
        command, _, rest = line.strip().partition(" ")
        if command == "steps":
            for _ in range(int(rest)):
                dist.all_reduce(torch.ones(101))
        elif command == "send":
            path, _, text = rest.partition(" ")
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(text.encode(), path)
        elif command == "publish":
            context = context or Context()
            context.publish(resource(dict(word.split("=") for word in rest.split())))
        print("done", flush=True)


main()
