"""Files of tokens: what they allow, what is refused, and that no error shows a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from probing.api.errors import ConfigError, Overloaded, PrivilegeError, Unauthenticated
from probing.api.proto.arrow.flight import Flight_pb2 as flight
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import bound
from probing.daemon.config import TlsConfig
from probing.daemon.query.caller import Caller, Scope
from probing.daemon.service.audit import Audit
from probing.daemon.service.auth import FOR_JOBS, RIGHTS, Doorkeeper, Rates, permit
from probing.daemon.service.tls import Certificate, Tls
from probing.daemon.service.tokens import GRANTS, Tokens

A, B, C = (letter * 20 for letter in "abc")
SEVERAL = f"""
[[token]]
name = "ops"
scope = "probe"
value = "{A}"
[[token]]
name = "team"
jobs = ["j1", "j2"]
value = "{B}"
[[token]]
name = "gn6"
scope = "peer"
value = "{C}"
"""
TCP = Caller("tcp", "10.0.0.1")
SERVICES = (pb.DESCRIPTOR.services_by_name["Node"], flight.DESCRIPTOR.services_by_name["FlightService"])
METHODS = {method.name: method for service in SERVICES for method in service.methods}


def written(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o640)
    return str(path)


def keeper(file: str) -> Doorkeeper:
    return Doorkeeper(Tokens(file), Tls(TlsConfig()), Audit())


def shown(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def test_each_token_has_its_scope_and_jobs(tmp_path: Path) -> None:
    made = keeper(written(tmp_path / "t", SEVERAL))
    found = [made.identified(TCP, shown(token)) for token in (A, B, C)]
    assert [(one.name, one.scopes, one.jobs) for one in found] == [
        ("ops", GRANTS[Scope.PROBE], None),
        ("team", GRANTS[Scope.READ], {"j1", "j2"}),
        ("gn6", GRANTS[Scope.PEER], None),
    ]
    assert Tokens(str(tmp_path / "t")).text == C
    for wrong in (A[:-1], A + "a", "", "d" * 20):
        with pytest.raises(Unauthenticated):
            made.identified(TCP, shown(wrong))


def test_what_is_bound_to_a_node_counts_there_alone(tmp_path: Path) -> None:
    file = written(tmp_path / "t", SEVERAL)
    here, there = Tokens(file, "gn6"), Tokens(file, "gn7")
    for value in (A, B, C):
        token = here.find(f"Bearer {value}")
        assert token is not None
        assert here.find(bound(value, "gn6")) is token
        assert there.find(bound(value, "gn6")) is None
        assert value not in bound(value, "gn6")
    wrong = bound(A, "gn6")
    for given in (bound(A, ""), wrong[:-1], wrong.replace("Bound", "Bearer"), wrong.upper(), f"Bound {A}"):
        assert here.find(given) is None
    # Who is replaced is refused at once.
    written(tmp_path / "new", SEVERAL.replace(A, "d" * 20))
    (tmp_path / "new").rename(tmp_path / "t")
    assert here.find(bound(A, "gn6")) is None


def test_one_token_is_for_reading_and_for_nodes(tmp_path: Path) -> None:
    tokens = Tokens(written(tmp_path / "t", A + "\n"))
    token = tokens.find(f"Bearer {A}")
    assert token is not None
    assert (token.scopes, token.jobs, tokens.text) == (GRANTS[Scope.PEER], None, A)
    assert A not in repr(token)


def test_a_changed_file_counts_and_a_broken_one_does_not(tmp_path: Path) -> None:
    tokens = Tokens(written(tmp_path / "t", A))
    written(tmp_path / "t", "short")
    assert tokens.find(f"Bearer {A}")
    written(tmp_path / "new", SEVERAL.replace(A, "d" * 20))
    (tmp_path / "new").rename(tmp_path / "t")
    assert tokens.find(f"Bearer {A}") is None
    assert tokens.find("Bearer " + "d" * 20)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('name = "ops"', 'name = ""', "no name"),
        ('name = "ops"', 'name = "team"', "equal names"),
        (A, B, "equal values"),
        (A, "short", "the token ops has no value"),
        ('"probe"', '"root"', "none of the scopes"),
        ('"probe"', '["probe"]', "none of the scopes"),
        ('"probe"', '"probe"\nuntil = 1', "unknown key 'until'"),
        ('["j1", "j2"]', "[]", "jobs of the token team"),
        ('["j1", "j2"]', '["j1"]\nscope = "admin"', 'its scope must be "read"'),
        ("[[token]]", "[[token]", "not TOML"),
        (SEVERAL, "# [[token]]", "must have 1 to"),
    ],
)
def test_what_is_wrong_is_named_without_a_token(tmp_path: Path, old: str, new: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Tokens(written(tmp_path / "t", SEVERAL.replace(old, new, 1)))
    assert why in caught.value.message
    assert not any(value in caught.value.message + caught.value.hint for value in (A, B, C))


def test_every_call_has_a_right() -> None:
    assert set(RIGHTS) == set(METHODS)
    assert set(RIGHTS) >= FOR_JOBS


@pytest.mark.parametrize("scope", list(Scope))
def test_a_scope_allows_what_its_name_says(scope: Scope) -> None:
    caller = Caller("tcp", "10.0.0.1", scopes=GRANTS[scope])
    change, reset = pb.ConfigRequest(key="sampling.hz", value="1"), pb.ConfigRequest(key="sampling.hz", reset=True)
    for method, request in (("Pause", pb.PauseRequest()), ("Config", change), ("Config", reset)):
        if scope in (Scope.PROBE, Scope.ADMIN):
            assert permit(method, request, caller) is Scope.PROBE
        else:
            with pytest.raises(PrivilegeError, match="the scope probe is needed"):
                permit(method, request, caller)
    assert permit("Config", pb.ConfigRequest(), caller) is Scope.READ


def test_a_limited_token_asks_for_its_jobs_alone() -> None:
    caller = Caller("tcp", "10.0.0.1", name="team", scopes=GRANTS[Scope.READ], jobs=frozenset(["j1"]))
    permit("Query", pb.QueryRequest(sql="SELECT 1"), caller)
    for method, kind in (
        ("Stacks", pb.StacksRequest),
        ("Vars", pb.VarsRequest),
        ("Facts", pb.FactsRequest),
        ("AwaitFinding", pb.AwaitFindingRequest),
    ):
        permit(method, kind(job="j1"), caller)
        for request in (kind(job="j2"), kind()):
            with pytest.raises(PrivilegeError, match="name one of them"):
                permit(method, request, caller)
    for method, request in (
        ("Stacks", pb.StacksRequest(job="j1", pids=[1])),
        ("Facts", pb.FactsRequest(job="j1", hardware=True)),
        ("Config", pb.ConfigRequest()),
        ("Preflight", pb.PreflightRequest(job="j1")),
        ("Sink", iter(())),
        ("QueryMany", pb.QueryManyRequest(query=pb.QueryRequest(sql="SELECT 1"))),
    ):
        with pytest.raises(PrivilegeError):
            permit(method, request, caller)


@pytest.mark.parametrize(
    ("scope", "by_node", "by_person"),
    [
        (Scope.READ, {Scope.READ}, {Scope.READ}),
        (Scope.PROBE, {Scope.READ}, {Scope.READ, Scope.PROBE}),
        (Scope.ADMIN, {Scope.READ}, {Scope.READ, Scope.PROBE, Scope.LAUNCH, Scope.ADMIN}),
        (Scope.LAUNCH, {Scope.READ}, {Scope.READ, Scope.LAUNCH}),
        (Scope.PEER, {Scope.READ, Scope.PEER}, {Scope.READ}),
    ],
)
def test_a_certificate_and_a_token_allow_what_both_allow(
    tmp_path: Path, scope: Scope, by_node: set[Scope], by_person: set[Scope]
) -> None:
    made = keeper(written(tmp_path / "t", f'[[token]]\nname = "one"\nscope = "{scope.value}"\nvalue = "{A}"\n'))
    node = Certificate("gn6", peer=True, ends=4e9, made=0, nodes=frozenset(["gn6"]))
    person = Certificate("alice", peer=False, ends=4e9, made=0)
    assert made.identified(TCP, shown(A), node).scopes == by_node
    assert made.identified(TCP, shown(A), person).scopes == by_person
    # A token that nobody knows says nothing: the node is itself, and the person is nobody.
    assert made.identified(TCP, shown(B), node).scopes == GRANTS[Scope.PEER]
    with pytest.raises(Unauthenticated):
        made.identified(TCP, shown(B), person)


def test_people_with_one_certificate_are_told_apart_by_their_tokens(tmp_path: Path) -> None:
    both = "".join(f'[[token]]\nname = "{name}"\nscope = "probe"\nvalue = "{A}{name}"\n' for name in ("ada", "bob"))
    made = keeper(written(tmp_path / "t", both))
    site = Certificate("people", peer=False, ends=4e9, made=0)
    callers = [made.identified(TCP, shown(f"{A}{name}"), site) for name in ("ada", "bob")]
    assert [str(caller) for caller in callers] == [f"tcp: {TCP.who} (people, {name})" for name in ("ada", "bob")]
    assert len({caller.key for caller in callers}) == len({caller.holder for caller in callers}) == 2
    # A node is its certificate.
    node = Certificate("gn6", peer=True, ends=4e9, made=0, nodes=frozenset(["gn6"]))
    assert made.identified(TCP, shown(f"{A}ada"), node).name == "gn6"


def test_the_jobs_of_a_token_limit_a_node_too(tmp_path: Path) -> None:
    made = keeper(written(tmp_path / "t", SEVERAL))
    node = Certificate("gn6", peer=True, ends=4e9, made=0, nodes=frozenset(["gn6"]))
    caller = made.identified(TCP, shown(B), node)
    assert (caller.scopes, caller.jobs, caller.nodes) == ({Scope.READ}, {"j1", "j2"}, {"gn6"})


def test_a_certificate_that_ended_is_refused() -> None:
    made = keeper("")
    peer = Certificate("gn6", peer=True, ends=4e9, made=0)
    assert made.identified(TCP, (), peer).scopes == GRANTS[Scope.PEER]
    client = Certificate("alice", peer=False, ends=4e9, made=0)
    assert made.identified(TCP, (), client).scopes == GRANTS[Scope.READ]
    with pytest.raises(Unauthenticated, match="expired"):
        made.identified(TCP, (), Certificate("gn6", peer=True, ends=1.0, made=0))


def test_refusals_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    audit = Audit(lambda: now[0])
    for _ in range(100):
        audit.refused(TCP, "a call", "the token is wrong", kind="Unauthenticated")
    now[0] = 11.0
    audit.refused(TCP, "a call", "the token is wrong", kind="Unauthenticated")
    for index in range(100):
        audit.call(Caller("tcp", str(index), name="x"), "query", Scope.READ, None)
    assert audit.counts == {"Unauthenticated": 101}
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:2] == [
        "a call asked by tcp: 10.0.0.1: refused: the token is wrong",
        "a call asked by tcp: 10.0.0.1: refused: the token is wrong (and 99 times since the last line)",
    ]
    assert len(lines) == 21


def test_calls_a_second_are_bounded_for_each_caller() -> None:
    now = [0.0]
    rates = Rates(10.0, lambda: now[0])

    def taken(caller: Caller) -> int:
        count = 0
        try:
            while count < 1000:
                rates.take(caller)
                count += 1
        except Overloaded:
            return count
        return -1

    assert taken(TCP) == 20
    assert taken(Caller("tcp", "10.0.0.1", name="other")) == 20
    # A user of this machine is one caller, whatever address of loopback the connection comes from.
    assert [taken(Caller("tcp", f"127.0.0.{number}, uid 7")) for number in (1, 2, 3)] == [20, 0, 0]
    assert taken(Caller("tcp", "127.0.0.1, uid 8")) == 20
    now[0] = 0.5
    assert taken(TCP) == 5
    now[0] = 100.0
    assert taken(TCP) == 20
