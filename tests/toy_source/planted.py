"""``probingd run`` with the toy source and its tables: ``planted.py OPTIONS``, or ``planted.py MODULE OPTIONS``."""

from __future__ import annotations

import logging
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from probing.api.tables import TABLES
from toy_source.tables import LOAD, LOAD_NOW


def main() -> int:
    if not sys.argv[1].startswith("probing."):
        return _supervise()
    TABLES.update({LOAD.name: LOAD, LOAD_NOW.name: LOAD_NOW})
    module = sys.argv.pop(1)
    if module == "probing.daemon.collector":
        from probing.daemon.collector import source_set
        from toy_source.source import LoadSource

        source_set.SOURCES = (*source_set.SOURCES, LoadSource)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _supervise() -> int:
    from probing.daemon.config import Config
    from probing.daemon.supervisor.children import PROGRAMS, Spawner
    from probing.daemon.supervisor.loop import Supervisor
    from probing.daemon.supervisor.rights import rights_table

    logging.basicConfig(level=logging.INFO)
    config = Config.from_args(sys.argv[1:])
    rights = rights_table(config)
    programs = {kind: ("-I", __file__, module) for kind, (*_, module) in PROGRAMS.items()}
    return Supervisor(config, rights, Spawner(rights, config, programs)).run()


if __name__ == "__main__":
    sys.exit(main())
