"""What must be true of the repository as a whole."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import tomllib

from probing.api.tables import TABLES, Table
from probing.client.app import CLUSTER_COMMANDS, COMMANDS, GROUP_COMMANDS, RANKS_COMMANDS
from probing.daemon.collector.source_set import SOURCES
from probing.daemon.source import Source
from probing.daemon.supervisor.children import PROGRAMS
from probing.diagnosis.ladder import RULES

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {
    f"probing.{folder}": folder
    for folder in ("api", "client", "daemon", "diagnosis", "federation", "groups", "launcher")
}


def tracked() -> list[Path]:
    """Files that git tracks or would add, without ignored ones."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def modules() -> list[str]:
    """Import names of all modules of the package, generated ones left out."""
    found = ["probing"]
    for name, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if "proto" not in parts and parts[-1] not in ("__main__", "conftest"):
                found.append(".".join([name, *(part for part in parts if part != "__init__")]))
    return found


def source(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def test_packages_are_the_folders() -> None:
    found = {"probing"}
    for name, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([name, *path.parent.relative_to(ROOT / folder).parts]))
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert listed == sorted(listed)
    assert found - set(listed) == set(), "`packages` in pyproject.toml lacks these folders"
    assert set(listed) - found == set(), "`packages` in pyproject.toml has folders that do not exist"


def test_each_part_is_in_its_list() -> None:
    # A part that its list lacks does nothing, and no other test may notice.
    loaded = {name: importlib.import_module(name) for name in modules()}
    things = {thing for module in loaded.values() for name, thing in vars(module).items() if _is_part(name, thing)}
    sources = {thing for thing in things if isinstance(thing, type)}
    assert sources - set(SOURCES) == set(), "SOURCES in daemon/collector/source_set.py lacks these"
    tables = {thing.name for thing in things if isinstance(thing, Table)}
    assert tables - TABLES.keys() == set(), "TABLES in api/tables/__init__.py lacks these"
    rules = {module for name, module in loaded.items() if name.startswith("probing.diagnosis.rules.")}
    assert rules - set(RULES) == set(), "RULES in diagnosis/ladder.py lacks these"
    commands = {name.rpartition(".")[2] for name in loaded if name.startswith("probing.client.commands.")}
    entries = (*COMMANDS.values(), *CLUSTER_COMMANDS.values(), *RANKS_COMMANDS.values(), *GROUP_COMMANDS.values())
    assert commands - {entry.module for entry in entries} == set(), "COMMANDS in client/app.py lacks these"


def _is_part(name: str, thing: object) -> bool:
    """Whether ``thing`` is a table, or a class of sources that the collector builds."""
    if isinstance(thing, type):
        return issubclass(thing, Source) and hasattr(thing, "make") and not name.startswith("_")
    return isinstance(thing, Table)


def test_classes_that_docstrings_name_exist() -> None:
    # As ``module.Class`` or ``package.module.CONSTANT``; NAME is a placeholder.
    known = {name: importlib.import_module(name) for name in modules()}
    lost = [
        f"{module}: {place}{name}"
        for module in known
        for place, name in re.findall(r"``((?:[a-z]\w*\.)+)([A-Z]\w*)``", source(module).read_text())
        if name != "NAME"
        and not any(f".{path}.".endswith(f".{place}") and hasattr(known[path], name) for path in known)
    ]
    assert lost == []


def test_public_names_are_listed() -> None:
    problems = [f"{module}: {problem}" for module in modules() for problem in _public_names(module)]
    assert problems == []


def _public_names(module: str) -> Iterator[str]:
    """What is wrong with ``__all__`` of one module; the order of its names is ruff's (RUF022)."""
    # Only texts are read: to parse all modules takes longer than to import them.
    text = source(module).read_text()
    public = set(re.findall(r"^(?:def|class) ([^\W_]\w*)", text, re.M))
    imported = importlib.import_module(module)
    if not hasattr(imported, "__all__"):
        if public:
            yield "public names without __all__"
        return
    names = imported.__all__
    if not isinstance(names, tuple):
        yield "__all__ is no tuple"
        return
    if len(set(names)) != len(names):
        yield "__all__ has a name twice"
    yield from (f"{name} is in __all__ only" for name in names if not hasattr(imported, name))
    yield from (f"{name} is public and not in __all__" for name in sorted(public - set(names)))


# Escaped text, quoted SQL and sizes by hand.
_BY_HAND = re.compile(
    r"""isprintable\(\) else "\?"|replace\("'", "''"\)|replace\('"', '""'\)|>> [123]0\} [KMG]|\} [kKMGT]i?B\b"""
)


def test_texts_and_sql_are_written_by_one_kit() -> None:
    found = [
        module for module in modules() if module != "probing.api.text" and _BY_HAND.search(source(module).read_text())
    ]
    assert found == []


def test_modules_have_docstrings() -> None:
    texts = {module: source(module).read_text() for module in modules()}
    docstring = re.compile(r'(?:#.*\n)*"""\S')
    assert [module for module, text in texts.items() if text.strip() and not docstring.match(text)] == []


def test_nothing_of_one_machine_is_written_down() -> None:
    hosts = re.compile(r"pythonhosted\.org|pypi\.org|download\.pytorch\.org|deb\.debian\.org")
    places = re.compile(r"/work/(?:main|shared)|/opt/(?:pypi|wheels)|/root/\.|\bshared/(?:DESIGN|reference)")
    wrong = []
    for path in tracked():
        if path == Path(__file__) or path.suffix in {".parquet", ".o", ".bin"}:
            continue
        text = path.read_bytes().decode("utf-8", "replace")
        wrong += [f"{path.relative_to(ROOT)}: {m[0]}" for m in (*hosts.finditer(text), *places.finditer(text))]
    assert wrong == []


def test_links_in_the_documents_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    links = {(page, target) for page in pages for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text())}
    lost = [f"{page.name}: {target}" for page, target in links if not (page.parent / target).exists()]
    assert [link for link in lost if "://" not in link] == []


def test_links_to_sections_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    sections = {page: {_slug(title) for title in re.findall(r"^#+ (.+)", page.read_text(), re.M)} for page in pages}
    lost = [
        f"{page.name}: {target}#{section}"
        for page in pages
        for target, section in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text())
        if (known := sections.get((page.parent / target).resolve() if target else page)) is not None
        and section not in known
    ]
    assert lost == []


def _slug(title: str) -> str:
    """Returns the name by which links name the section of a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def test_the_menu_of_the_site_has_each_page() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = set(re.findall(r": ([\w-]+\.md)$", menu, re.M))
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_both_readmes_show_the_same_commands() -> None:
    def commands(name: str) -> set[str]:
        return set(re.findall(r"`(probing(?:ctl|d) \w+)|^((?:make|systemctl) \w+)", (ROOT / name).read_text(), re.M))

    assert commands("README.md") == commands("README.zh-CN.md")


def test_each_command_is_described() -> None:
    # flamegraph is described with profile; neither it nor export writes JSON.
    shown = {name for name, entry in COMMANDS.items() if not entry.hidden} - {"flamegraph"}
    cli = re.findall(r"^\| `(\w+)", (ROOT / "docs" / "cli.md").read_text(), re.M)
    assert shown - set(cli) == set(), "docs/cli.md lacks these commands"
    lines = re.findall(r"^\*\*`.*", (ROOT / "docs" / "json.md").read_text(), re.M)
    json = {name for line in lines for name in re.findall(r"`(\w+)", line.partition(":")[0])}
    assert shown - json - {"export"} == set(), "docs/json.md lacks these commands"


def test_the_license_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_architecture_names_the_folders_and_processes_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"^\| `([\w/]+)` \|", page.partition("## Folders")[2].partition("\n## ")[0], re.M))
    found = (path.parent for top in FOLDERS.values() for path in (ROOT / top).rglob("__init__.py"))
    packages = {name for path in found if not (name := str(path.relative_to(ROOT))).startswith("api/proto")}
    packages |= {"sdk", "api/proto"}
    assert packages - named == set(), "docs/architecture.md has no line for these folders"
    assert named - packages == set(), "docs/architecture.md has lines for folders that do not exist"
    entries = set(re.findall(r"`python -m (probing\.[\w.]+)", page))
    assert {words[-1] for words in PROGRAMS.values()} <= entries
    assert [name for name in entries if importlib.util.find_spec(name) is None] == []


def test_the_documents_name_files_that_exist() -> None:
    pages = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    placeholder = re.compile(r"[A-Z]{2}|-vN$")
    tops = "api|bench|client|daemon|diagnosis|docs|examples|federation|packaging|sdk|tests"
    named = {(page.name, path) for page in pages for path in re.findall(rf"`((?:{tops})/[\w./-]+)`", page.read_text())}
    lost = {(page, path) for page, path in named if not (ROOT / path).exists() and not placeholder.search(path)}
    assert sorted(lost) == []


def test_the_tests_that_documents_name_exist() -> None:
    tests = [path for folder in ("tests", "vm-tests") for path in (ROOT / folder).rglob("*.py")]
    defined = {
        name for path in tests for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = {name for path in (ROOT / "docs").glob("*.md") for name in re.findall(r"`(test_\w+)`", path.read_text())}
    assert len(named) > 80
    assert named - defined == set()


def test_the_package_carries_the_files_of_the_page() -> None:
    folder = ROOT / "client" / "web"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["probing.client.web"]
    carried = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    assert carried == {path for path in tracked() if path.is_relative_to(folder / "static")}
