"""A program that makes counted calls of two functions, and its process."""

from __future__ import annotations

import subprocess
from pathlib import Path

from probing.daemon.elf.symbols import read_symbol

__all__ = ("TARGET", "Target")

TARGET = r"""
#include <stdio.h>
#include <stdlib.h>

typedef long function(long, long, long, long, long, long, long, long);
function with_push, without_push;

#ifdef __x86_64__
asm(".globl with_push\n.type with_push, @function\nwith_push:\n"
    "push %rbp\nmov %rsp, %rbp\nmov %rdi, %rax\npop %rbp\nret\n.size with_push, .-with_push\n"
    ".globl without_push\n.type without_push, @function\nwithout_push:\n"
    "mov %rdi, %rax\nret\n.size without_push, .-without_push\n");
#else
__attribute__((noinline)) long with_push(long a, long b, long c, long d, long e, long f, long g, long h)
{
	asm volatile("" ::"r"(b), "r"(c), "r"(d), "r"(e), "r"(f), "r"(g), "r"(h) : "memory");
	return a;
}
__attribute__((noinline)) long without_push(long a, long b, long c, long d, long e, long f, long g, long h)
{
	asm volatile("" ::"r"(b), "r"(c), "r"(d), "r"(e), "r"(f), "r"(g), "r"(h) : "memory");
	return a;
}
#endif

int main(void)
{
	function *volatile functions[] = {with_push, without_push};
	long which, count, next = 0;

	while (scanf("%ld %ld", &which, &count) == 2) {
		for (long i = 0; i < count; i++)
			functions[which](next++, 1, 2, 3, 44, 55, 66, 77);
		printf("%ld\n", next);
		fflush(stdout);
	}
	return 0;
}
"""


class Target:
    """A process that calls a function a given number of times, with the number of the call as first argument."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with open(path, "rb") as file:
            symbols = [read_symbol(file.fileno(), name) for name in ("with_push", "without_push")]
        self.offsets = [symbol.file_offset for symbol in symbols if symbol and symbol.file_offset]

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, count: int, which: int = 0) -> None:
        """Return when the calls were made."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{which} {count}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline()

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()
