"""The files in which the collector keeps the records of groups."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from probing.api.errors import StoreError, UsageError
from probing.daemon.collector.group_records import MAX_RECORD, GroupRecords
from probing.groups.spec import MAX_GROUPS


def kept(records: GroupRecords) -> dict[str, Any]:
    _, payload = records.kept()
    return dict(json.loads(payload))


def test_records_are_there_after_a_restart(tmp_path: Path) -> None:
    directory = tmp_path / "groups"
    records = GroupRecords(directory)
    assert kept(records) == {"records": {}, "damaged": []}
    records.keep("llama", 1, b"{}")
    records.keep("Llama", 1, '{"a": "\u4f60"}'.encode())
    records.keep("llama", 2, b"[]")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in directory.iterdir()) == ["Llama.json", "llama.json"]
    again = GroupRecords(directory)
    assert kept(again) == {"records": {"llama": "[]", "Llama": '{"a": "\u4f60"}'}, "damaged": []}
    # The numbers begin anew with the process that writes them.
    again.keep("llama", 1, b"1")


def test_a_request_that_comes_late_undoes_nothing(tmp_path: Path) -> None:
    # The service gave it up, went on, and answered another node with what came after it.
    records = GroupRecords(tmp_path / "groups")
    records.keep("llama", 7, b"7")
    for number in (7, 6):
        with pytest.raises(UsageError, match="a newer record of group llama was written meanwhile"):
            records.keep("llama", number, b"6")
    records.keep("other", 6, b"6")
    assert kept(records)["records"] == {"llama": "7", "other": "6"}


def test_the_record_with_the_highest_number_is_kept(tmp_path: Path) -> None:
    records = GroupRecords(tmp_path / "groups")
    numbers = iter(range(1, 24))
    lock = threading.Lock()

    def keep() -> None:
        while True:
            with lock:
                number = next(numbers, 0)
            if not number:
                return
            try:
                records.keep("llama", number, str(number).encode())
            except UsageError:
                continue

    threads = [threading.Thread(target=keep) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept(records)["records"] == {"llama": "23"}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "groups"
    records = GroupRecords(directory)
    for number, group in enumerate(("llama", "torn", "list", "empty")):
        records.keep(group, number + 1, b"{}")
    for group, text in (("torn", b'{"group": "to'), ("list", b"[]"), ("empty", b"")):
        (directory / f"{group}.json").write_bytes(text)
    found = kept(GroupRecords(directory))
    assert found["records"] == {"llama": "{}"}
    assert set(found["damaged"]) == {"torn", "list", "empty"}


@pytest.mark.parametrize("name", ["", "..", "../llama", "a/b", "a\0", "a" * 300, "llama\n"])
def test_a_name_that_is_no_file_of_the_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="valid group name"):
        GroupRecords(tmp_path / "groups").keep(name, 1, b"{}")
    assert not list(tmp_path.iterdir())


def test_records_are_bounded(tmp_path: Path) -> None:
    directory = tmp_path / "groups"
    records = GroupRecords(directory)
    with pytest.raises(UsageError, match="has 4,194,305 bytes"):
        records.keep("llama", 0, b" " * (MAX_RECORD + 1))
    records.keep("llama", 1, b"\\" * MAX_RECORD)
    assert kept(GroupRecords(directory))["records"] == {"llama": "\\" * MAX_RECORD}
    for number in range(MAX_GROUPS - 1):
        (directory / f"{number}.json").touch()
    with pytest.raises(UsageError, match="this node has 1024 groups"):
        records.keep("other", 1, b"{}")
    records.keep("llama", 2, b"{}")


def test_a_record_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "groups").write_text("no directory")
    with pytest.raises(StoreError, match="the record of a group cannot be written"):
        GroupRecords(tmp_path / "groups").keep("llama", 1, b"{}")
    # A partial file of an earlier process is no record, and in nobody's way.
    directory = tmp_path / "others"
    directory.mkdir()
    (directory / "llama.new").write_bytes(b"{")
    records = GroupRecords(directory)
    assert kept(records)["records"] == {}
    records.keep("llama", 1, b"{}")
    assert kept(records)["records"] == {"llama": "{}"}
