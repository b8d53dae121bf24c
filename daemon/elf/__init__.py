"""Reads ELF files, symbols and unwind tables in the parser, with bounds on time and memory.

Layouts of structs are read by pyelftools (``nccl_uprobes.layouts.from_dwarf``), which is too slow for symbols and
frames. The table shows CPU time, and peak resident memory including Python and the imported modules
(docs/benchmarks.md):

| question | ours | pyelftools 0.33 | limit |
|---|---|---|---|
| symbols: gloo probes in libtorch_cpu 2.13 | 0.10 to 0.13 s, 120 MiB | 9.6 to 10.2 s, 33 MiB | 3 s |
| frame: function and CFI of an address in it | 0.04 s, 66 MiB | 49 to 60 s, 1590 MiB | 1 s, 1 GiB |

Ours and pyelftools were run alternately, three times each; ``frame`` with pyelftools was run only twice.
"""
