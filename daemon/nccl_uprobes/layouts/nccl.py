"""Layouts of NCCL releases: the offsets of the fields of struct ncclComm that the BPF programs read.

``make_nccl.py`` makes the tables from the published wheels. The offsets are not trusted: the programs use a layout only
if NCCL's two magic words lie at its offsets, and check each value that they read.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from probing.api.errors import UnsupportedTarget

__all__ = ("ABSENT", "MAX_LAYOUTS", "NCCL_LAYOUTS", "UNGUARDED_LAYOUTS", "NcclLayout")

ABSENT = 0xFFFF_FFFF
MAX_LAYOUTS = 64
"""The number of entries of the map ``nccl_layouts``."""
_NO_OFFSETS = ("versions", "build_ids")


class NcclLayout(NamedTuple):
    """The values of ``struct nccl_layout`` (nccl.bpf.c): offsets in struct ncclComm in bytes, ABSENT for a missing
    field.

    rank, nRanks, cudaDev and nvmlDev follow ``comm_hash``. ``comm_name`` is a char*, in ncclConfig_t since 2.27.
    ``seq_number`` is an array of ``seq_count`` u64. It is ABSENT before 2.26, because those versions do not always
    count operations. ``versions`` and ``build_ids`` (hex) identify the wheels with this layout.
    """

    versions: tuple[str, ...]
    build_ids: tuple[str, ...]
    end_magic: int
    comm_hash: int
    bus_id: int = ABSENT
    node: int = ABSENT
    nnodes: int = ABSENT
    async_result: int = ABSENT
    abort_flag: int = ABSENT
    comm_name: int = ABSENT
    seq_number: int = ABSENT
    seq_count: int = ABSENT

    @classmethod
    def of(cls, comm: Mapping[str, int], versions: tuple[str, ...] = (), build_ids: tuple[str, ...] = ()) -> NcclLayout:
        """Returns the layout with the offsets in ``comm``, which comes from ``from_dwarf``. Raises UnsupportedTarget
        for impossible offsets.
        """
        offsets = {name: comm[name] for name in cls.offset_names() if name in comm}
        if "comm_hash" not in offsets or not all(
            type(offset) is int and 0 <= offset < ABSENT for offset in offsets.values()
        ):
            raise UnsupportedTarget("struct ncclComm of this library has impossible offsets")
        offsets.setdefault("end_magic", ABSENT)
        return cls(versions, build_ids, **offsets)

    @classmethod
    def offset_names(cls) -> tuple[str, ...]:
        """Returns the names of the offsets, in the order of ``pack``."""
        return tuple(name for name in cls._fields if name not in _NO_OFFSETS)

    @property
    def version(self) -> str:
        """The newest version with this layout."""
        return self.versions[-1] if self.versions else "unknown"

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(int(getattr(self, name)) for name in self.offset_names())

    def pack(self) -> bytes:
        return struct.pack(f"<{len(self.offsets)}I", *self.offsets)


# The indexes are keys of a map that outlives the daemon: only append entries.
NCCL_LAYOUTS: tuple[NcclLayout, ...] = (
    NcclLayout(
        versions=("2.21.5",),
        build_ids=("2e87d0e7f2a98a3fc40945c13c095f8b7e5ef72b",),
        end_magic=0x3F98,
        comm_hash=0x34D8,
        bus_id=0x3500,
        node=0x358C,
        nnodes=0x3590,
        async_result=0x3A7C,
        abort_flag=0x3A80,
    ),
    NcclLayout(
        versions=("2.22.3",),
        build_ids=("fefdad6cbb9a572e9c57bbf211c22701173eefc5",),
        end_magic=0x35978,
        comm_hash=0x34248,
        bus_id=0x34270,
        node=0x34304,
        nnodes=0x34308,
        async_result=0x347F4,
        abort_flag=0x347F8,
    ),
    NcclLayout(
        versions=("2.23.4",),
        build_ids=("edadae13fd6ddf2d2ebb53938f3bcf47edb4690c",),
        end_magic=0x3DCD8,
        comm_hash=0x3C4A0,
        bus_id=0x3C4C8,
        node=0x3C55C,
        nnodes=0x3C560,
        async_result=0x3CAE8,
        abort_flag=0x3CAF0,
        comm_name=0x3C498,
    ),
    NcclLayout(
        versions=("2.24.3",),
        build_ids=("ccdf5fe9c23cc9452c582d12a14245e907276193",),
        end_magic=0x3DAC8,
        comm_hash=0x3C4A0,
        bus_id=0x3C4C8,
        node=0x3C55C,
        nnodes=0x3C560,
        async_result=0x3CAB4,
        abort_flag=0x3CAB8,
        comm_name=0x3C498,
    ),
    NcclLayout(
        versions=("2.25.1", "2.25.1.post1"),
        build_ids=("d2902f420436a457bfe41444ff46182810cb495d", "e0b57746eb4318649ac9202e7a5d65bf6630e21c"),
        end_magic=0x7A548,
        comm_hash=0x784A0,
        bus_id=0x784C8,
        node=0x7855C,
        nnodes=0x78560,
        async_result=0x78B34,
        abort_flag=0x78B38,
        comm_name=0x78498,
    ),
    NcclLayout(
        versions=("2.26.2", "2.26.2.post1", "2.26.5"),
        build_ids=(
            "674f9f3dc90a590b3a6836257528c9446b827023",
            "a64355ab574540ddbbcbcad86548059136059565",
            "5c9b4531233f157f885a9fca7580bca6dea2c0fe",
        ),
        end_magic=0x7BB78,
        comm_hash=0x784B0,
        bus_id=0x784D8,
        node=0x7856C,
        nnodes=0x78570,
        async_result=0x78B44,
        abort_flag=0x78B48,
        comm_name=0x784A8,
        seq_number=0x7A510,
        seq_count=5,
    ),
    NcclLayout(
        versions=("2.27.3", "2.27.5", "2.27.6", "2.27.7"),
        build_ids=(
            "13340a53a699271eb201ba800886e819c3ba392a",
            "3c098e0640c8b4936323d594852079dac2cde793",
            "4c2e7c6f8639829dc748be277281e223774a2412",
            "401f52e455b9a6bec6a7c04241b464253dd1ef15",
        ),
        end_magic=0x107BF8,
        comm_hash=0x1044B0,
        bus_id=0x1044D8,
        node=0x10456C,
        nnodes=0x104570,
        async_result=0x104B44,
        abort_flag=0x104B48,
        comm_name=0x106500,
        seq_number=0x106550,
        seq_count=5,
    ),
    NcclLayout(
        versions=("2.28.3",),
        build_ids=("346d97098b6c7208b920d35b780390e354d15099",),
        end_magic=0x1081D0,
        comm_hash=0x1044C0,
        bus_id=0x1044E8,
        node=0x10457C,
        nnodes=0x104580,
        async_result=0x104FEC,
        abort_flag=0x104FF0,
        comm_name=0x1069B0,
        seq_number=0x106A08,
        seq_count=5,
    ),
    NcclLayout(
        versions=("2.28.7", "2.28.9"),
        build_ids=("82ed7671a003070048c288e96b2148fb8cd2f549", "6a77e2593a48cfad8fd78319beec87a40fd812fb"),
        end_magic=0x108650,
        comm_hash=0x1044C8,
        bus_id=0x1044F0,
        node=0x104584,
        nnodes=0x104588,
        async_result=0x104FF4,
        abort_flag=0x104FF8,
        comm_name=0x1069B8,
        seq_number=0x106A10,
        seq_count=5,
    ),
    NcclLayout(
        versions=("2.29.2", "2.29.3"),
        build_ids=("ac2b86cb6b2a51c28005f16159522143ebfd07f1", "f01aa799951b61d614b196aceb61107b2efaa80a"),
        end_magic=0x108D80,
        comm_hash=0x1046D0,
        bus_id=0x1046F8,
        node=0x10478C,
        nnodes=0x104790,
        async_result=0x1051FC,
        abort_flag=0x105200,
        comm_name=0x106E18,
        seq_number=0x106E78,
        seq_count=5,
    ),
    NcclLayout(
        versions=("2.29.7",),
        build_ids=("51943fef80521fbce0dafcd0e685cabf68fbd538",),
        end_magic=0x124DE0,
        comm_hash=0x1206D0,
        bus_id=0x1206F8,
        node=0x12078C,
        nnodes=0x120790,
        async_result=0x1211FC,
        abort_flag=0x121200,
        comm_name=0x122E18,
        seq_number=0x122E78,
        seq_count=5,
    ),
    NcclLayout(
        versions=("2.30.3", "2.30.4"),
        build_ids=("9aa6bf285845413451ceb0ecf0d32f9d1111c44d", "a6b6f6793ad5a3325eb7320bd022822c423d6962"),
        end_magic=0x124E68,
        comm_hash=0x1206D8,
        bus_id=0x120700,
        node=0x120794,
        nnodes=0x120798,
        async_result=0x121214,
        abort_flag=0x121218,
        comm_name=0x122E20,
        seq_number=0x122E88,
        seq_count=5,
    ),
    NcclLayout(
        versions=("2.30.7",),
        build_ids=("e72c1a084255ed2eb11239c6cfb62d5716d2caf4",),
        end_magic=0x124E78,
        comm_hash=0x1206E8,
        bus_id=0x120710,
        node=0x1207A4,
        nnodes=0x1207A8,
        async_result=0x121224,
        abort_flag=0x121228,
        comm_name=0x122E30,
        seq_number=0x122E98,
        seq_count=5,
    ),
    NcclLayout(
        versions=("2.31.2",),
        build_ids=("3ec218307fcb58c834fb5bcba646ced2a1fbf581",),
        end_magic=0x1241A8,
        comm_hash=0x1206E0,
        bus_id=0x120708,
        node=0x12079C,
        nnodes=0x1207A0,
        async_result=0x121570,
        abort_flag=0x121578,
        comm_name=0x1236B8,
        seq_number=0x123730,
        seq_count=5,
    ),
    NcclLayout(
        versions=("2.32.3",),
        build_ids=("855c15bcfbac035d484e5b6c3348bffa19387e0e",),
        end_magic=0x1241F0,
        comm_hash=0x1206E0,
        bus_id=0x120708,
        node=0x1207A8,
        nnodes=0x1207AC,
        async_result=0x121578,
        abort_flag=0x121580,
        comm_name=0x1236C8,
        seq_number=0x123748,
        seq_count=5,
    ),
)
# The programs do not get these layouts: NCCL before 2.21 has no magic words, so freed memory of a communicator looks
# like a communicator.
UNGUARDED_LAYOUTS: tuple[NcclLayout, ...] = (
    NcclLayout(
        versions=("2.18.1",),
        build_ids=("1dad5f311750cd2062c4f0915aec7610635e0a7d",),
        end_magic=ABSENT,
        comm_hash=0x23D0,
        bus_id=0x23F0,
        node=0x247C,
        nnodes=0x2480,
        async_result=0x2910,
        abort_flag=0x2918,
    ),
    NcclLayout(
        versions=("2.18.3",),
        build_ids=("55c87fca1d9f74d7e92f74e81eb04555219c8e3c",),
        end_magic=ABSENT,
        comm_hash=0x23D0,
        bus_id=0x23F8,
        node=0x2484,
        nnodes=0x2488,
        async_result=0x2918,
        abort_flag=0x2920,
    ),
    NcclLayout(
        versions=("2.19.3",),
        build_ids=("466b18565ce024026b79a3c426714b8ebdd62cd8",),
        end_magic=ABSENT,
        comm_hash=0x24D0,
        bus_id=0x24F8,
        node=0x2584,
        nnodes=0x2588,
        async_result=0x2A54,
        abort_flag=0x2A58,
    ),
    NcclLayout(
        versions=("2.20.5",),
        build_ids=("0aa8317d81ac9d1a3a1dd8bb5c902a95b69ad91c",),
        end_magic=ABSENT,
        comm_hash=0x28D0,
        bus_id=0x28F8,
        node=0x2984,
        nnodes=0x2988,
        async_result=0x2E5C,
        abort_flag=0x2E60,
    ),
)
