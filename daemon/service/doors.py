"""What guards the public ports: tokens, TLS, the audit log and the door-keeper."""

from __future__ import annotations

from typing import NamedTuple

from probing.daemon.config import Config, TlsConfig
from probing.daemon.service.audit import Audit
from probing.daemon.service.auth import Doorkeeper, check_listen
from probing.daemon.service.rates import Rates
from probing.daemon.service.tls import Tls
from probing.daemon.service.tokens import Tokens

__all__ = ("Doors",)


class Doors(NamedTuple):
    """The guards of one service."""

    tokens: Tokens
    tls: Tls
    audit: Audit
    keeper: Doorkeeper

    @classmethod
    def of(cls, config: Config) -> Doors:
        """Returns the guards of ``config``. Raises ConfigError for an open port, or for files that cannot be used."""
        for key, address in (("listen", config.listen), ("http", config.http)):
            if address:
                check_listen(
                    address,
                    token_file=config.token_file,
                    insecure=config.insecure,
                    tls=bool(config.tls.cert),
                    client_ca=bool(config.tls.client_ca),
                    key=key,
                )
        tcp = bool(config.listen or config.http)
        tls = Tls(config.tls if tcp else TlsConfig())
        tokens, audit = Tokens(config.token_file if tcp else "", config.node_name), Audit()
        return cls(tokens, tls, audit, Doorkeeper(tokens, tls, audit, Rates(config.calls_per_s)))
