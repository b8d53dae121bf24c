"""Groups on the page: the form leads back to the same specification, and a page that cannot sign names the command."""

from __future__ import annotations

import shlex
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import PrivilegeError, UsageError
from probing.client.groups.changes import with_fields
from probing.client.groups.records import GroupsSeen
from probing.client.nodes import Nodes
from probing.client.web.groups import ACTIONS, _fields, _shown, refusing
from probing.client.web.panels import Question
from probing.client.web.parameters import Parameters
from probing.client.web.start import signs_for_caller
from probing.groups.spec import Spec

NOTHING_SEEN = GroupsSeen({}, [], {}, {})
VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


def question(**parameters: Any) -> Question:
    given = {name: value for name, value in parameters.items() if value is not None}
    return Question(cast(Any, None), Parameters.of_json(given))


@given(words=st.lists(VALUES, max_size=4), values=st.lists(VALUES, max_size=4))
def test_the_form_leads_back_to_the_same_specification(words: list[str], values: list[str]) -> None:
    env = {f"V{number}": value for number, value in enumerate(values)}
    spec = Spec(
        name="llama",
        version=3,
        owner="ann",
        uid=1000,
        signed_on="n1",
        workers=("n1-0", "n1-1"),
        master="n1",
        command=("python", *words),
        env=env,
        cwd="/data",
        restart="always",
    )
    form = {**_shown(spec), "workers": ",".join(spec.workers)}
    bare = Spec(name="llama", version=3, owner="ann", uid=1000, signed_on="n1", workers=(), master="", command=())
    assert with_fields(bare, _fields(question(**form)), NOTHING_SEEN) == spec


def test_a_page_that_cannot_sign_names_the_command() -> None:
    panels = refusing()
    assert panels.keys() == ACTIONS.keys()
    for address, panel in panels.items():
        with pytest.raises(PrivilegeError, match="cannot sign") as refused:
            panel(question(name="x'; rm -r \x1b"))
        words = shlex.split(refused.value.hint.split("`")[1])
        assert words[:2] == ["probingctl", "group"], address
        assert words[3] == "x'; rm -r \\x1b"


def test_a_page_under_sudo_signs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    assert signs_for_caller()
    monkeypatch.setenv("SUDO_UID", "1000")
    assert not signs_for_caller()


def test_the_page_of_a_team_asks_no_unix_socket_that_a_node_names() -> None:
    with Nodes("127.0.0.1:7077", tcp_alone=True) as nodes:
        assert nodes.at(["127.0.0.1:7078"]).addresses() == ("127.0.0.1:7078",)
        with pytest.raises(UsageError, match="asks for no token"):
            nodes.at(["unix:/run/other.sock"])


def test_positions_in_logs_are_longer_than_other_numbers() -> None:
    parameters = Parameters({"from": "123456789012345"})
    assert parameters.number("from", 15) == 123456789012345
    with pytest.raises(UsageError):
        parameters.number("from")
