"""Profiles in every format: no time is lost, and no name breaks the file."""

from __future__ import annotations

import gzip
import json
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from probing.client.profile.formats.other_tools import folded, folded_difference, pprof, speedscope
from probing.client.profile.formats.svg import MAX_DEPTH, SCRIPT, STYLE, boxes, flame_graph, flame_graph_difference
from probing.client.profile.model import (
    IMPORTS,
    Frame,
    Profile,
    Sample,
    folded_imports,
    grouped,
    label,
    short_files,
    without_lines,
)
from probing.client.profile.write import difference_rows, function_rows

# As google/pprof's proto/profile.proto has them: name, number, type; packed repeated fields are marked by a star.
_MESSAGES = {
    "ValueType": "type 1 int64, unit 2 int64",
    "Label": "key 1 int64, str 2 int64, num 3 int64, num_unit 4 int64",
    "Sample": "location_id 1 uint64*, value 2 int64*, label 3 Label*",
    "Mapping": "id 1 uint64",
    "Line": "function_id 1 uint64, line 2 int64",
    "Location": "id 1 uint64, mapping_id 2 uint64, address 3 uint64, line 4 Line*",
    "Function": "id 1 uint64, name 2 int64, system_name 3 int64, filename 4 int64, start_line 5 int64",
    "Profile": (
        "sample_type 1 ValueType*, sample 2 Sample*, mapping 3 Mapping*, location 4 Location*, function 5 Function*, "
        "string_table 6 string*, drop_frames 7 int64, keep_frames 8 int64, time_nanos 9 int64, "
        "duration_nanos 10 int64, period_type 11 ValueType, period 12 int64, comment 13 int64*, "
        "default_sample_type 14 int64"
    ),
}
_SCALARS = {"int64": 3, "uint64": 4, "string": 9}

names = st.text(max_size=12)
frame_lists = st.lists(
    st.builds(Frame, names, st.one_of(st.just(""), names), st.one_of(st.none(), st.integers(1, 10**6))),
    min_size=1,
    max_size=6,
)
labels = st.dictionaries(st.sampled_from(["job", "rank", "thread"]), st.text(min_size=1, max_size=6))
samples = st.lists(
    st.builds(
        lambda f, ns, n, found: Sample(tuple(f), ns, n, tuple(found.items())),
        frame_lists,
        st.integers(0, 10**15),
        st.integers(0, 10**6),
        labels,
    ),
    max_size=8,
)
profiles = st.builds(lambda title, found: Profile(title, "cpu", tuple(found), 10**18, 10**9), names, samples)


def pprof_profile(data: bytes) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="p.proto", package="p", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            title, number, kind = field.split()
            base = kind.rstrip("*")
            scalar = _SCALARS.get(base)
            entry = message.field.add(name=title, number=int(number), label=3 if kind.endswith("*") else 1)
            entry.type = scalar or 11  # type: ignore[assignment]
            if scalar is None:
                entry.type_name = f".p.{base}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call]
    parsed = message_factory.GetMessageClass(pool.FindMessageTypeByName("p.Profile"))()
    parsed.ParseFromString(gzip.decompress(data))
    # A field that is none of the format would be kept as an unknown one.
    parsed_again = type(parsed)()
    parsed_again.CopyFrom(parsed)
    parsed_again.DiscardUnknownFields()
    assert parsed_again.SerializeToString() == parsed.SerializeToString()
    return parsed


@given(profiles)
def test_folded_keeps_all_time_a_line_a_stack(profile: Profile) -> None:
    lines = folded(profile).split("\n")
    assert lines.pop() == ""
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == profile.ns
    assert {len(s.frames) for s in profile.samples} == {line.count(";") + 1 for line in lines}
    assert len(lines) == len({line.rpartition(" ")[0] for line in lines})


@given(profiles, profiles)
def test_folded_difference_keeps_both_times(base: Profile, chosen: Profile) -> None:
    lines = folded_difference(base, chosen).split("\n")[:-1]
    weights = [line.rsplit(" ", 2)[1:] for line in lines]
    assert (sum(int(a) for a, _ in weights), sum(int(b) for _, b in weights)) == (base.ns, chosen.ns)


@given(profiles)
def test_speedscope_gives_back_every_stack(profile: Profile) -> None:
    document = json.loads(speedscope([profile, without_lines(profile)], "t", "e"))
    frames = document["shared"]["frames"]
    first, second = document["profiles"]
    assert sum(first["weights"]) == first["endValue"] == second["endValue"] == profile.ns
    sums: dict[tuple[Any, ...], int] = {}
    for sample in profile.samples:
        key = tuple((f.func or "?", f.file or None, f.lineno) for f in sample.frames)
        sums[key] = sums.get(key, 0) + sample.ns
    got: dict[tuple[Any, ...], int] = {}
    for numbers, weight in zip(first["samples"], first["weights"], strict=True):
        key = tuple((frames[n]["name"], frames[n].get("file"), frames[n].get("line")) for n in numbers)
        got[key] = got.get(key, 0) + weight
    assert got == sums


@given(profiles)
def test_pprof_gives_back_every_sample(profile: Profile) -> None:
    found = pprof_profile(pprof(profile, "probingctl"))
    text = list(found.string_table)
    assert text[0] == ""
    assert [(text[t.type], text[t.unit]) for t in found.sample_type] == [("samples", "count"), ("cpu", "nanoseconds")]
    assert text[found.default_sample_type] == "cpu"
    assert (found.time_nanos, found.duration_nanos) == (10**18, 10**9)
    assert sum(s.value[0] for s in found.sample) == profile.seen
    assert sum(s.value[1] for s in found.sample) == profile.ns
    functions = {f.id: (text[f.name], text[f.filename]) for f in found.function}
    places = {p.id: (*functions[p.line[0].function_id], p.line[0].line) for p in found.location}
    assert 0 not in places
    got = {
        (tuple(places[i] for i in s.location_id), tuple((text[k.key], text[k.str]) for k in s.label))
        for s in found.sample
    }
    assert got == {
        (tuple((f.func or "?", f.file, f.lineno or 0) for f in reversed(s.frames)), s.labels) for s in profile.samples
    }


@given(profiles, profiles)
def test_a_flame_graph_is_xml_with_all_time_in_it(base: Profile, chosen: Profile) -> None:
    for text, found in (
        (flame_graph(base, "s"), [base]),
        (flame_graph_difference(base, chosen, "s"), [base, chosen]),
    ):
        page = ET.fromstring(text)
        drawn = [e for e in page.iter() if e.get("class") == "f"]
        scripts = [e.text for e in page.iter() if e.tag.endswith("}script")]
        assert scripts == [SCRIPT]
        assert not [e for e in page.iter() for name in e.attrib if name.lower().startswith("on")]
        # Nothing is fetched: the only addresses are those of the two name spaces.
        assert set(re.findall(r"https?://\S+?\"", text)) <= {
            'http://www.w3.org/2000/svg"',
            'http://www.w3.org/1999/xhtml"',
        }
        assert len(drawn) == len(list(boxes(found)))
        assert next(boxes(found)).ns == tuple(p.ns for p in found)


@given(profiles)
def test_frames_lie_within_those_that_called_them(profile: Profile) -> None:
    above: dict[int, Any] = {}
    for box in boxes([profile]):
        if box.depth:
            parent = above[box.depth - 1]
            assert parent.left - 1e-9 <= box.left
            assert box.left + box.width <= parent.left + parent.width + 1e-9
            assert box.ns[0] <= parent.ns[0]
        above[box.depth] = box


def test_hostile_names_are_only_text() -> None:
    evil = "</title></svg><script>alert('1')</script>\"&]]>\x00\x1b\u202e\ud800\ufffe"
    profile = Profile(evil, "cpu", (Sample((Frame(evil, evil, 1), Frame(";;\n", "a b.py")), 5, 1, (("job", evil),)),))
    page = ET.fromstring(flame_graph(profile, evil))
    assert len([e for e in page.iter() if e.tag.endswith("}script")]) == 1
    (line,) = folded(profile).splitlines()
    assert line.endswith(":::\\n (a b.py) 5".replace(":::", "::"))
    assert json.loads(speedscope([profile], evil, "e"))["name"] == evil
    assert pprof_profile(pprof(profile, evil)).sample[0].value == [1, 5]


def test_the_import_system_is_one_frame() -> None:
    machinery = tuple(Frame(name, "<frozen importlib._bootstrap>") for name in ("_find_and_load", "_load_unlocked"))
    loader = Frame("exec_module", "<frozen importlib._bootstrap_external>")
    train, torch, numpy = Frame("<module>", "/t.py"), Frame("<module>", "/torch.py"), Frame("<module>", "/numpy.py")
    step = Frame("step", "/t.py")
    given = Profile(
        "job",
        "cpu",
        (
            Sample((train, *machinery, loader, torch, *machinery, loader, numpy), 5, 1),
            Sample((train, *machinery), 2, 1),
            Sample((train, step), 1, 1),
        ),
    )
    imports = Frame(IMPORTS)
    assert [s.frames for s in folded_imports(given).samples] == [
        (train, imports, torch, numpy),
        (train, imports),
        (train, step),
    ]
    assert folded_imports(given).ns == given.ns


def test_style_and_script_can_stand_in_xml() -> None:
    assert not set("&<") & set(STYLE + SCRIPT)


def test_stacks_too_deep_to_be_looked_at_are_cut() -> None:
    deep = Profile("deep", "cpu", (Sample(tuple(Frame(f"f{i}", "x.py") for i in range(5000)), 7, 1),))
    assert max(box.depth for box in boxes([deep])) == MAX_DEPTH
    ET.fromstring(flame_graph(deep, ""))
    assert folded(deep).count(";") == 4999


def test_what_is_in_one_profile_alone_is_drawn_in_the_difference() -> None:
    base = Profile("a", "cpu", (Sample((Frame("gone", "x.py"),), 10, 1),))
    chosen = Profile("b", "cpu", (Sample((Frame("new", "x.py"),), 30, 1),))
    found = {box.frame.func: box for box in boxes([base, chosen]) if box.frame is not None}
    assert {name: (box.width, box.shares) for name, box in found.items()} == {
        "gone": (0.5, (1.0, 0.0)),
        "new": (0.5, (0.0, 1.0)),
    }


@given(profiles)
def test_functions_are_counted_once_a_sample(profile: Profile) -> None:
    rows = function_rows(profile)
    assert sum(row["self_ns"] for row in rows) == profile.ns
    assert all(0 <= row["self_ns"] <= row["total_ns"] <= profile.ns for row in rows)
    assert len(rows) == len({(row["func"], row["file"], row["lineno"]) for row in rows})


def test_recursion_is_counted_once() -> None:
    f = Frame("f", "x.py")
    (row,) = function_rows(Profile("t", "cpu", (Sample((f, f, f), 10, 1),)))
    assert (row["self_ns"], row["total_ns"], row["total_share"]) == (10, 10, 1.0)


@given(profiles, profiles)
def test_changes_of_self_time_cancel_out(base: Profile, chosen: Profile) -> None:
    rows = difference_rows(base, chosen)
    expected = float(bool(chosen.ns)) - float(bool(base.ns))
    assert sum(row["self_change"] for row in rows) == pytest.approx(expected, abs=1e-9)


def test_groups_are_outermost_frames() -> None:
    profile = Profile("t", "cpu", (Sample((Frame("f"),), 1, 1, (("rank", "3"),)), Sample((Frame("f"),), 1, 1)))
    assert [s.frames[:2] for s in grouped(profile, ("rank", "job")).samples] == [
        (Frame("rank 3"), Frame("job -")),
        (Frame("rank -"), Frame("job -")),
    ]


def test_files_are_short_but_never_the_same() -> None:
    files = [
        "/v/lib/python3.11/site-packages/torch/nn/functional.py",
        "/usr/lib/python3.11/json/encoder.py",
        "/home/a/llm/train.py",
        "/home/b/llm/train.py",
        "/home/a/llm/model.py",
        "x.py",
        "<string>",
    ]
    profile = Profile("t", "cpu", (Sample(tuple(Frame("f", file) for file in files), 1, 1),))
    assert list(map(short_files([profile]).__getitem__, files)) == [
        "torch/nn/functional.py",
        "json/encoder.py",
        "/home/a/llm/train.py",
        "/home/b/llm/train.py",
        "llm/model.py",
        "x.py",
        "<string>",
    ]
    assert label(Frame("", "/home/a/llm/model.py", 3), short_files([profile])) == "? (llm/model.py:3)"
