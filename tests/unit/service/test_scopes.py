"""Which scope a change of a setting needs: what is collected, probe; what is kept and who is told, admin."""

from __future__ import annotations

import pytest

from probing.api.errors import PrivilegeError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.collector.live_settings import SETTINGS
from probing.daemon.config import options
from probing.daemon.query.caller import Caller, Scope
from probing.daemon.service.auth import permit
from probing.daemon.service.tokens import GRANTS

KEPT = sorted(key for key in SETTINGS if key.startswith("store."))
# Options that cannot be changed at run time, and what is no option.
OTHERS = ("diagnose.hook", "diagnose.enabled", "query.timeout_s", "", "no such", "storE.")
COLLECTED = sorted(set(SETTINGS) - set(KEPT))


def caller(scope: Scope) -> Caller:
    return Caller("tcp", "127.0.0.1", scopes=GRANTS[scope])


def asks(key: str) -> list[pb.ConfigRequest]:
    """Returns each way to change a setting, or to ask what that would do."""
    return [
        pb.ConfigRequest(key=key, value="1"),
        pb.ConfigRequest(key=key, value="1", yes=True, persist=True),
        pb.ConfigRequest(key=key, value=""),
        pb.ConfigRequest(key=key, reset=True),
        pb.ConfigRequest(key=key, propose_value="1"),
        pb.ConfigRequest(key=key, propose_reset=True),
    ]


@pytest.mark.parametrize("key", [*KEPT, *OTHERS])
@pytest.mark.parametrize("scope", [Scope.READ, Scope.PROBE, Scope.PEER])
def test_only_admin_changes_what_is_kept(key: str, scope: Scope) -> None:
    for request in asks(key):
        with pytest.raises(PrivilegeError, match="the scope admin is needed"):
            permit("Config", request, caller(scope))
        assert permit("Config", request, caller(Scope.ADMIN)) is Scope.ADMIN


@pytest.mark.parametrize("key", COLLECTED)
def test_probe_changes_what_is_collected(key: str) -> None:
    for request in asks(key):
        assert permit("Config", request, caller(Scope.PROBE)) is Scope.PROBE
        for scope in (Scope.READ, Scope.PEER):
            with pytest.raises(PrivilegeError, match="the scope probe is needed"):
                permit("Config", request, caller(scope))


def test_everybody_who_reads_sees_the_settings() -> None:
    for key in ("", *SETTINGS):
        assert permit("Config", pb.ConfigRequest(key=key), caller(Scope.READ)) is Scope.READ


def test_the_limits_that_can_be_changed_are_those_of_the_store() -> None:
    assert set(KEPT) < {key for key, _ in options()}
    assert len(KEPT) == 5
