"""What an ordinary user does to cost the daemon time, memory or rows of others: ``attacker.py ATTACK ARGUMENTS``.

Each prints ``open`` once it is under way, or ends when it is over; those under way end with their standard input.
Modules of ``tests/hostile`` make the files.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
CALLS = b"init first plain\ndo 3 all_reduce 1 7\nexit\n"


def main() -> None:
    # A trainer, for all that can be seen of it.
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    sys.path.insert(0, str(TESTS))
    name, *arguments = sys.argv[1:]
    ATTACKS[name](*arguments)


def hold() -> None:
    print("open", flush=True)
    sys.stdin.read()


def until_input() -> Iterator[None]:
    """Rounds until the standard input ends."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    print("open", flush=True)
    while not ended.is_set():
        yield


def executable(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)


def tiny(job: str, folder: str, count: str) -> None:
    """Processes that each call three times and end."""
    truth = {"NCCL_DOUBLE_DIR": folder, "NCCL_DOUBLE_TRUTH": f"{folder}/truth"}
    for _ in range(int(count) // 8):
        group = [
            subprocess.Popen(
                [job],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **truth},
            )
            for _ in range(8)
        ]
        for process in group:
            process.communicate(CALLS)


def names(library: str, folder: str, count: str) -> None:
    """Copies of a library under long names, all of them mapped."""
    place = Path(folder, *["n" * 200] * 10)
    place.mkdir(parents=True)
    kept = []
    for number in range(int(count)):
        shutil.copy(library, copy := place / f"libnccl.so.{number}")
        kept.append(executable(copy))
    hold()


def elf(kind: str, folder: str) -> None:
    """A file that is small on disk and endless to read, new each second."""
    from hostile import elf_files

    path = Path(folder, "libnccl.so.2")
    kept = []
    for number in until_input_numbers():
        getattr(elf_files, kind)(path)
        kept.append(executable(path))
        path = Path(folder, f"libnccl.so.{number + 3}")
        time.sleep(1)


def until_input_numbers() -> Iterator[int]:
    return (number for number, _ in enumerate(until_input()))


def dump(kind: str, library: str, folder: str) -> None:
    """A dump of the flight recorder that costs its reader much, written anew all the time."""
    path = Path(folder, "dump")
    if os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE") != str(path):
        os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = str(path)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    from hostile import flight_dumps

    kept = executable(Path(library))
    for _ in until_input():
        getattr(flight_dumps, kind)(Path(f"{path}0"))
        time.sleep(0.2)
    del kept


def mappings(library: str, folder: str) -> None:
    """Maps and unmaps a library in a loop."""
    shutil.copy(library, path := Path(folder, "libnccl.so.2"))
    for _ in until_input():
        for _ in range(1000):
            executable(path).close()


def calls(job: str, library: str, folder: str, count: str) -> None:
    """Calls as fast as they go, in a copy of its own of the library."""
    shutil.copy(library, folder)
    own = {"LD_LIBRARY_PATH": folder, "NCCL_DOUBLE_DIR": folder, "NCCL_DOUBLE_TRUTH": "/dev/null"}
    process = subprocess.Popen([job], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={**os.environ, **own})
    process.communicate(f"init first plain\nloop all_reduce {count}\nexit\n".encode())


def threads(count: str) -> None:
    threading.stack_size(64 << 10)
    ended = threading.Event()
    for _ in range(int(count)):
        threading.Thread(target=lambda: [None for _ in iter(lambda: ended.wait(1), True)], daemon=True).start()
    hold()
    os._exit(0)


def forks(count: str) -> None:
    """Children that end at once."""
    for _ in range(int(count)):
        if os.fork() == 0:
            os._exit(0)
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)


def stopped(job: str, folder: str, count: str) -> None:
    """Trainers that stand still in the middle of their work."""
    own = {"NCCL_DOUBLE_DIR": folder, "NCCL_DOUBLE_TRUTH": "/dev/null"}
    # The attack ends by a kill: nobody would be left to end them.
    command = ["setpriv", "--pdeathsig", "KILL", job]
    group = []
    for _ in range(int(count)):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **own})
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"init first plain\nloop all_reduce 1000000000\n")
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        group.append(process)
    hold()
    for process in group:
        process.kill()


def place(kind: str, library: str, folder: str) -> None:
    """Something else where a library was that is mapped."""
    shutil.copy(library, path := Path(folder, "libnccl.so.2"))
    kept = executable(path)
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.symlink_to("/dev/zero")
    hold()
    del kept


def dwarf(library: str, folder: str, start: str, size: str) -> None:
    """A library with false debug information."""
    kept = []
    for number, filling in enumerate((b"\xff", b"\x01", b"\x80\x80\x80\x01", bytes(range(1, 255)))):
        place = Path(folder, str(number))
        place.mkdir()
        shutil.copy(library, path := place / "libnccl.so.2")
        with path.open("r+b") as file:
            file.seek(int(start))
            file.write((filling * int(size))[: int(size)])
        kept.append(executable(path))
    hold()


def ras(library: str, port: str) -> None:
    """A port of NCCL's RAS that sends for ever."""
    kept = executable(Path(library))
    with socket.create_server(("127.0.0.1", int(port))) as server:
        threading.Thread(target=lambda: [_send(server) for _ in iter(int, 1)], daemon=True).start()
        hold()
    del kept
    os._exit(0)


def claim(port: str, rank: str, exits: str) -> None:
    """Claims a rank of somebody's job; ``exits``: the code with which it ends, or empty."""
    os.environ |= {"RANK": rank, "WORLD_SIZE": "3", "MASTER_PORT": port}
    if exits:
        print("open", flush=True)
        # The daemon has to see that it was there.
        sys.stdin.readline()
        sys.exit(int(exits))
    hold()


def pair(port: str, folder: str, rank: str) -> None:
    """A rank of two that make collectives of their own, in the name of somebody's job."""
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": rank, "WORLD_SIZE": "3", "MASTER_PORT": port}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
    ones = torch.ones(7)
    for _ in until_input():
        dist.all_reduce(ones)
        time.sleep(0.05)


def many(count: str) -> None:
    """Processes that each claim to be a rank of a job of two."""
    claimed = [{"TORCHELASTIC_RUN_ID": f"s{number:03}", "WORLD_SIZE": "2"} for number in range(int(count))]
    # They end with this process.
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    kept = [subprocess.Popen(waits, env={**os.environ, **env}, stdin=subprocess.PIPE) for env in claimed]
    hold()
    del kept


def _send(server: socket.socket) -> None:
    client, _ = server.accept()
    with client, suppress(OSError):
        while True:
            client.sendall(b"x" * 65536)


def lock(path: str) -> None:
    """Prints the result of opening each of the daemon's own files."""
    for name in (f"{path}.lock", f"{path}.d/control/collector.sock", f"{path}.d/reader.sock"):
        try:
            if name.endswith(".lock"):
                os.close(os.open(name, os.O_RDONLY))
            else:
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(name)
        except OSError as e:
            print(e.strerror)
        else:
            print("opened", name)


ATTACKS = {
    function.__name__: function
    for function in (
        tiny,
        names,
        elf,
        dump,
        mappings,
        calls,
        threads,
        forks,
        stopped,
        place,
        dwarf,
        ras,
        lock,
        claim,
        pair,
        many,
    )
}

if __name__ == "__main__":
    main()
