"""Reads ELF files and DWARF in the parser, with bounds on time and memory.

pyelftools is too slow for it; tests compare with it. CPU s, and peak resident MiB with Python and the
imported modules (docs/benchmarks.md):

| question | ours | pyelftools 0.33 | limit |
|---|---|---|---|
| symbols: gloo probes in libtorch_cpu 2.13 | 0.10 to 0.13 s, 120 MiB | 9.6 to 10.2 s, 33 MiB | 3 s |
| frame: function and CFI of an address there | 0.04 s, 66 MiB | 49 to 60 s, 1590 MiB | 1 s, 1 GiB |
| layout: struct ncclComm in libnccl 2.30.7 | 0.04 s, 58 MiB | 0.06 to 0.07 s, 94 MiB | 2 s |
| absent: a struct in none of its 136 units | 0.6 s, 83 MiB | 5.2 to 5.5 s, 521 MiB | 2 s |

Three runs in turn; two of ``frame`` with pyelftools.
"""
