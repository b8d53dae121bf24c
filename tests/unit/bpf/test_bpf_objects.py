"""Building objects and reading their types: neither needs a right."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from probing.api.errors import AttachError, ConfigError, FormatError
from probing.daemon.bpf.btf import Btf
from probing.daemon.bpf.build import build, compile_object
from probing.daemon.bpf.libbpf import Object

SOURCE = r"""
#include "guard.bpf.h"
#include "loss.bpf.h"

enum colour { RED, GREEN = 23 };

typedef struct {
	__u8 small;
	__u64 large;
} pair;

struct odd_record {
	__u8 first;
	__s16 second;
	enum colour colour;
	const void *pointer;
	char name[11];
	__u32 numbers[3];
	pair pairs[2];
	union {
		__u32 word;
		__u8 bytes[6];
	} either;
	volatile const __u16 last;
};

const volatile __u16 small_constant = 7;
const volatile __u64 large_constant = 5;

RING(odd, struct odd_record, 1 << 16);

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 7);
	__type(key, pair);
	__type(value, struct odd_record);
} table SEC(".maps");

UPROBE(probe_it)
{
	if (small_constant + large_constant + (long)ctx)
		RING_LOST(odd);
}

char LICENSE[] SEC("license") = "GPL";
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("objects") / "odd.bpf.c"
    source.write_text(SOURCE)
    return compile_object(source)


def test_record_has_the_layout_that_the_compiler_gave_it(built: Path) -> None:
    with Object("odd", built.read_bytes()) as found:
        record = found.btf.record("odd")
        key, value = found.btf.map_types("table")
    assert record.fields is not None
    offsets = {name: int(field[1]) for name, field in record.fields.items()}
    assert offsets == {
        "first": 0,
        "second": 2,
        "colour": 4,
        "pointer": 8,
        "name": 16,
        "numbers": 28,
        "pairs": 40,
        "either": 72,
        "last": 80,
    }
    assert record.itemsize == 88
    assert (record["name"], record["second"], record["pointer"]) == (np.dtype("S11"), np.dtype("<i2"), np.dtype("<u8"))
    assert record["pairs"].shape == (2,)
    assert record["pairs"].base.itemsize == 16
    assert value == record
    assert key == record["pairs"].base


def test_object_tells_what_it_holds(built: Path) -> None:
    with Object("odd", built.read_bytes()) as found:
        assert found.sections == {"probe_it": "uprobe"}
        assert found.rings == ["odd"]
        guard = {"control", "hits", "budgets", "process_budgets", "refusals_reported"}
        assert set(found.maps) == guard | {"odd", "odd_loss", "table"}
        variables = found.btf.variables(".rodata")
        assert variables["small_constant"][1] == np.dtype("<u2")
        assert len({offset for offset, _ in variables.values()}) == len(variables)
        found.set_constants({"small_constant": 23, "no_such_constant": 1})


def test_ring_without_a_record_type_is_a_format_error(built: Path) -> None:
    with Object("odd", built.read_bytes()) as found, pytest.raises(FormatError):
        found.btf.record("table")


@pytest.mark.parametrize("data", [b"", b"\x7fELF" + bytes(100), b"text"])
def test_what_is_no_object_is_an_attach_error(data: bytes) -> None:
    with pytest.raises(AttachError) as caught:
        Object("broken", data)
    assert caught.value.hint


@pytest.mark.parametrize("data", [b"", bytes(40), b"\x9f\xeb\1\0" + b"\xff" * 40])
def test_damaged_types_are_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        Btf(data)


def test_only_what_is_older_than_its_sources_is_built_again(tmp_path: Path) -> None:
    source = tmp_path / "odd.bpf.c"
    source.write_text(SOURCE)
    header = tmp_path / "mine.bpf.h"
    header.write_text("")
    objects = build(tmp_path)
    assert [path.name for path in objects] == ["odd.bpf.o", "odd.preempt.bpf.o"]
    first = [path.stat().st_ino for path in objects]
    assert [path.stat().st_ino for path in build(tmp_path)] == first
    later = objects[0].stat().st_mtime_ns + 1_000_000_000
    os.utime(header, ns=(later, later))
    assert [path.stat().st_ino for path in build(tmp_path)] != first
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["mine.bpf.h", "odd.bpf.c", "odd.bpf.o", "odd.preempt.bpf.o"]
    )


def test_same_source_gives_the_same_object_wherever_it_lies(tmp_path: Path) -> None:
    contents = []
    for folder in ("here", "there/and/deeper"):
        (tmp_path / folder).mkdir(parents=True)
        source = tmp_path / folder / "odd.bpf.c"
        source.write_text(SOURCE)
        contents.append(compile_object(source).read_bytes())
    assert contents[0] == contents[1]


def test_source_that_does_not_compile_is_a_config_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "bad.bpf.c"
    source.write_text("int broken(")
    with pytest.raises(ConfigError, match="clang"):
        compile_object(source)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.bpf.c"]
    assert "bad.bpf.c" in capfd.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="not installed"):
        compile_object(source)
