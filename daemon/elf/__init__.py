"""Reads ELF files and DWARF in the parser, with bounds on time and memory.

pyelftools is too slow for it; tests compare with it. ``python -m bench elf_readers`` measures both: CPU s, and peak
resident MiB with Python and the imported modules.

| question | ours | pyelftools 0.33 | limit |
|---|---|---|---|
| symbols of the gloo probes in libtorch_cpu 2.13 (.dynsym, then .symtab) | 0.13 s, 121 MiB | 10.8 s, 34 MiB | 3 s |
| function and frame of one address there (.symtab, .eh_frame) | 0.04 s, 66 MiB | 59.7 s, 1592 MiB | 1 s, 1 GiB |
| offsets of struct ncclComm in libnccl 2.30.7, found in the first unit | 0.03 s, 58 MiB | 0.08 s, 95 MiB | 2 s |
| a struct that is not there: all of 136 units | 0.6 s, 58 MiB | 5.6 s, 521 MiB | 2 s |
"""
