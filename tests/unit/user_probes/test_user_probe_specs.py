"""What users may write in NAME.toml, and what is made of it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import ConfigError, ProbingError
from probing.daemon.user_probes.c_text import TaskOffsets, entries, record_dtype, render
from probing.daemon.user_probes.compiler import complaint_of, header_trees
from probing.daemon.user_probes.spec import read_spec, spec_names, stamp_of

PLACE = """
[[attach]]
kind = "uprobe"
library = "libc.so*"
symbol = "read"
function = "on_read"
"""
COLUMN = """
[[columns]]
name = "size_bytes"
type = "u64"
doc = "Size."
"""
HEAD = 'description = "Reads."\n'
GOOD = HEAD + PLACE + COLUMN
EXAMPLES = Path(__file__).parents[3] / "examples" / "probes"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    return tmp_path


def write(folder: Path, toml: str | bytes, code: str = "") -> Path:
    (folder / "p.toml").write_bytes(toml if isinstance(toml, bytes) else toml.encode())
    (folder / "p.c").write_text(code)
    return folder


def column(**keys: object) -> str:
    return "[[columns]]\n" + "".join(f"{key} = {value!r}\n" for key, value in keys.items())


def test_what_is_left_out_has_a_value(folder: Path) -> None:
    spec = read_spec(write(folder, GOOD, "int x;"), "p")
    assert (spec.who, spec.budget, spec.code, spec.doc) == ("trainers", 10_000, "int x;", "Reads.")
    assert spec.attach[0].where == "read in libc.so*"
    assert spec.table.name == "user.p"
    assert spec.table.logical.names[-1] == "size_bytes"


@pytest.mark.parametrize(
    ("toml", "message", "hint"),
    [
        (b"\xff", "p.toml is not UTF-8 text", "UTF-8"),
        ("a = [", "p.toml is not TOML: ", "docs/user-probes.md"),
        (GOOD + "[x]\n", "unknown key x", "known here: description, processes, budget, attach, columns"),
        (PLACE + COLUMN, "description is missing", "a text in quotes"),
        (HEAD + 'processes = "mine"\n' + PLACE + COLUMN, "processes = 'mine' is wrong", "trainers, training, all"),
        (HEAD + "budget = 0\n" + PLACE + COLUMN, "budget = '0' is wrong", "1 to 1000000"),
        (HEAD + "budget = true\n" + PLACE + COLUMN, "budget = 'True' is wrong", "1 to 1000000"),
        (HEAD + COLUMN, "attach is missing", "1 to 8 tables [[attach]]"),
        (HEAD + PLACE * 9 + COLUMN, "attach = 'list' is wrong", "1 to 8"),
        (HEAD + PLACE, "columns is missing", "1 to 64 tables [[columns]]"),
        (GOOD.replace("uprobe", "kprobe"), "attach[0].kind = 'kprobe' is wrong", "uprobe, uretprobe, tracepoint"),
        (GOOD.replace("on_read", "on read"), "attach[0].function = 'on read' is wrong", "the name of a C function"),
        (GOOD.replace('"read"', '"re*"'), "attach[0].symbol = 're*' is wrong", "without wildcards"),
        (GOOD.replace("symbol", "symbols"), "unknown key attach[0].symbols", "kind, function, library, symbol"),
        ('processes = "all"\n' + GOOD, "attach[0].library = 'libc.so*' is wrong", "the path of a file"),
        (HEAD + PLACE + column(name="a", type="f64", doc="A."), "columns[0].type = 'f64' is wrong", "u8, u16"),
        (HEAD + PLACE + column(name="A", type="u8", doc="A."), "columns[0].name = 'A' is wrong", "a letter first"),
        (HEAD + PLACE + column(name="int", type="u8", doc="A."), "columns[0].name = 'int' is wrong", "not a word of C"),
        (HEAD + PLACE + column(name="a", type="text", doc="A."), "columns[0].bytes is missing", "1 to 256"),
        (HEAD + PLACE + column(name="a", type="u8", doc="A.", bytes=3), "unknown key columns[0].bytes", "name, type"),
        (HEAD + PLACE + column(name="rank", type="u8", doc="A."), "cannot have a column 'rank'", "every table has"),
        (GOOD + COLUMN, "cannot have a column 'size_bytes'", "each name must differ"),
    ],
)
def test_what_is_wrong_is_named_with_a_way_out(folder: Path, toml: str | bytes, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_spec(write(folder, toml), "p")
    assert message in refused.value.message
    assert str(folder) in refused.value.message
    assert hint in refused.value.hint


def test_files_that_others_may_write_are_refused(folder: Path) -> None:
    write(folder, GOOD)
    for path in (folder, folder / "p.toml", folder / "p.c"):
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        with pytest.raises(ConfigError, match="is writable by users other than its owner"):
            read_spec(folder, "p")
        path.chmod(mode)
    (folder / "p.c").unlink()
    with pytest.raises(ConfigError, match=r"p\.c cannot be read: No such file"):
        read_spec(folder, "p")


def test_a_change_of_a_file_or_of_its_rights_is_seen(folder: Path) -> None:
    write(folder, GOOD)
    stamps = [stamp_of(folder, "p")]
    (folder / "p.c").write_text("int y;")
    stamps.append(stamp_of(folder, "p"))
    (folder / "p.c").chmod(0o600)
    stamps.append(stamp_of(folder, "p"))
    (folder / "p.c").unlink()
    stamps.append(stamp_of(folder, "p"))
    assert len(set(stamps)) == 4
    assert spec_names(folder) == ["p"]
    assert spec_names(folder / "none") == []
    for number in range(40):
        (folder / f"q{number}.toml").touch()
    with pytest.raises(ConfigError, match="has 41 probes"):
        spec_names(folder)


def test_events_have_no_bytes_that_nobody_sets(folder: Path) -> None:
    kinds = [("a", "u8", 0), ("b", "u64", 0), ("c", "text", 5), ("d", "i32", 0), ("e", "u16", 0)]
    columns = "".join(column(name=n, type=t, doc="X.", **({"bytes": b} if b else {})) for n, t, b in kinds)
    spec = read_spec(write(folder, HEAD + PLACE + columns), "p")
    dtype = record_dtype(spec)
    names = dtype.names or ()
    offsets = [int(dtype.fields[name][1]) for name in names] if dtype.fields else []
    assert np.diff([*offsets, dtype.itemsize]).tolist() == [dtype[name].itemsize for name in names]
    assert dtype.itemsize % 8 == 0
    for name, width in (("b", 8), ("d", 4), ("e", 2)):
        assert int(dtype.fields[name][1]) % width == 0 if dtype.fields else False
    text = render(spec, Path('/etc/"x"'), TaskOffsets(1234, 5678))
    assert "u8 a; char probing_pad5[7]; u64 b; char c[5]; char" in text
    assert " probing_pad8[3]; s32 d; u16 e; char probing_pad11[2];" in text
    assert '#line 1 "/etc/\\"x\\"/p.c"\n' in text
    assert "+ 1234ULL" in text
    assert "+ 5678ULL" in text
    assert entries(spec, multi=True) == [("probing_entry_0", 2, 48)]
    assert entries(spec, multi=False) == [("probing_entry_0", 2, 0)]


def test_events_fit_on_the_stack_of_a_program(folder: Path) -> None:
    columns = "".join(column(name=f"c{i}", type="text", doc="X.", bytes=200) for i in range(2))
    with pytest.raises(ConfigError, match="take 424 bytes, at most 384 fit"):
        record_dtype(read_spec(write(folder, HEAD + PLACE + columns), "p"))


def test_a_tracepoint_asks_who_is_meant(folder: Path) -> None:
    place = '[[attach]]\nkind = "tracepoint"\ntracepoint = "sched:sched_switch"\nfunction = "f"\n'
    spec = read_spec(write(folder, HEAD + place + COLUMN), "p")
    text = render(spec, folder, TaskOffsets(0, 0))
    assert "int probing_entry_0(struct tracepoint__sched__sched_switch *ctx)" in text
    assert "if (probing_is_listed() && probing_enter())" in text
    everywhere = read_spec(write(folder, HEAD + 'processes = "all"\n' + place + COLUMN), "p")
    assert "if (probing_enter())" in render(everywhere, folder, TaskOffsets(0, 0))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_examples_are_right(path: Path, folder: Path) -> None:
    for suffix in (".toml", ".c"):
        (folder / f"{path.stem}{suffix}").write_bytes(path.with_suffix(suffix).read_bytes())
    spec = read_spec(folder, path.stem)
    assert record_dtype(spec).itemsize
    assert all(f"static int {place.function}(" in spec.code for place in spec.attach)


@given(data=st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_any_file_gives_a_probe_or_an_error(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("probes")
    folder.chmod(0o755)
    write(folder, data)
    with pytest.raises(ProbingError):
        read_spec(folder, "p")


@pytest.mark.parametrize(
    ("log", "complaint"),
    [
        ("", ""),
        ("a\n/e/p.c:3:7: error: use of x\n  x\n/e/p.c:4:1: error: y\n", "/e/p.c:3:7: error: use of x"),
        ("/e/p.c:1:1: fatal error: 'z.h' file not found", "/e/p.c:1:1: fatal error: 'z.h' file not found"),
        ("0: r1\nR0 invalid mem access\nprocessed 2 insns\n\nbpf: Failed\n", "R0 invalid mem access"),
        ("processed 2 insns\n", ""),
    ],
)
def test_the_line_that_says_what_is_wrong(log: str, complaint: str) -> None:
    assert complaint_of(log) == complaint


def test_headers_of_another_kernel_do(tmp_path: Path) -> None:
    with pytest.raises(ProbingError, match="no kernel headers") as refused:
        header_trees(tmp_path / "modules", tmp_path / "src")
    assert "linux-headers" in refused.value.hint
    machine = {"x86_64": "x86", "aarch64": "arm64"}[os.uname().machine]
    modules, sources = tmp_path / "modules", tmp_path / "src"

    def headers(common: Path, flavour: Path) -> list[str]:
        (common / "include/linux").mkdir(parents=True)
        (common / "include/linux/kconfig.h").touch()
        (flavour / f"arch/{machine}/include/generated").mkdir(parents=True)
        return [str(flavour), str(common)]

    debian = headers(sources / "linux-headers-4.0-1-common", sources / "linux-headers-4.0-1-amd64")
    assert header_trees(modules, sources) == debian
    (modules / "5.0/build").mkdir(parents=True)
    linked = headers(modules / "4.0/source", modules / "4.0/build")
    assert header_trees(modules, sources) == linked
    own = modules / os.uname().release / "build/include/linux"
    own.mkdir(parents=True)
    (own / "kconfig.h").touch()
    assert header_trees(modules, sources) is None
