"""Dataclasses whose objects are rows, as Probing's ``@table`` makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import probing


@pytest.fixture(autouse=True)
def no_tables() -> Iterator[None]:
    yield
    for name in ("train_step", "losses", "tiny"):
        probing.ExternalTable.drop(name)


def test_objects_become_rows_in_the_order_of_the_fields() -> None:
    @probing.table
    @dataclass
    class TrainStep:
        step: int
        loss: float
        where: str = "head"

    TrainStep.append(TrainStep(5, 0.5))
    TrainStep(7, 0.25, "tail").save()
    TrainStep.append_many(TrainStep(step, 1.0) for step in (11, 13, 23))
    assert probing.ExternalTable.get("train_step").names() == ["step", "loss", "where"]
    assert [row for _, row in TrainStep.take(2)] == [[13, 1.0, "head"], [23, 1.0, "head"]]
    assert [row[0] for _, row in TrainStep.take()] == [5, 7, 11, 13, 23]
    TrainStep.drop()
    assert TrainStep.take() == []


@pytest.mark.parametrize("decorator", [probing.table("Losses"), probing.table("losses", capacity_bytes=1 << 20)])
def test_the_name_may_be_given(decorator: object) -> None:
    @decorator  # type: ignore[operator]
    @dataclass
    class Other:
        loss: float

    Other(0.5).save()  # type: ignore[attr-defined]
    assert [row for _, row in probing.ExternalTable.get("losses").take()] == [[0.5]]


def test_names_of_classes() -> None:
    @probing.table()
    @dataclass
    class Tiny:
        n: int

    assert Tiny.init_table() is probing.ExternalTable.get("tiny")  # type: ignore[attr-defined]


def test_what_is_no_dataclass_and_what_has_other_columns() -> None:
    with pytest.raises(TypeError, match="not a dataclass"):

        @probing.table
        class Plain:
            pass

    probing.ExternalTable("tiny", ["other"])

    @probing.table
    @dataclass
    class Tiny:
        n: int

    with pytest.raises(ValueError, match="other columns"):
        Tiny(1).save()  # type: ignore[attr-defined]
