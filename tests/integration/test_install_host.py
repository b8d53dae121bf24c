"""`make install-host` into an image, and the package of it: commands run from their place, units have all they name."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from long import long

# It installs all dependencies.
pytestmark = long
ROOT = Path(__file__).resolve().parents[2]
PREFIX = "/opt/probingd-test"
# As on the host: what lies at the prefix of the image is at the prefix.
AT_ITS_PLACE = 'mkdir -p "$1" && mount --bind "$0$1" "$1" && shift && exec "$@"'


def make(target: str, image: Path) -> None:
    done = subprocess.run(
        [ROOT / "packaging" / "install-host.sh", target],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DESTDIR": str(image), "PREFIX": PREFIX},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        timeout=900,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("image")
    make("install", path)
    yield path
    if Path(PREFIX).is_dir():
        Path(PREFIX).rmdir()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("command", "word"), [("probingd", "version"), ("probingctl", "version")])
def test_commands_run_from_the_prefix(image: Path, command: str, word: str) -> None:
    link = (image / "usr" / "local" / "bin" / command).readlink()
    assert link == Path(PREFIX, "bin", command)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", AT_ITS_PLACE, image, PREFIX, link, word],
        env={"PATH": "/usr/bin:/bin", "PROBING_TARGET": "unix:/nowhere"},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert command in done.stdout
    assert str(ROOT) not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def units_of(folder: str) -> set[str]:
    """Returns the names of the units of a folder below packaging."""
    return {path.name for path in (ROOT / "packaging" / folder).iterdir() if path.is_file()}


@pytest.mark.timeout(900)
def test_units_name_what_is_there(image: Path) -> None:
    units = image / "usr" / "lib" / "systemd" / "system"
    assert {path.name for path in units.iterdir()} == units_of("systemd")
    of_users = image / "usr" / "lib" / "systemd" / "user"
    assert {path.name for path in of_users.iterdir()} == units_of("systemd/user")
    for unit in (*units.iterdir(), *of_users.iterdir()):
        text = unit.read_text()
        assert not re.search(r"/opt/probingd/", text)
        for program in re.findall(r"^Exec\w+=(/\S+)", text, re.M):
            # A program of ours, or of every system.
            assert (image / program.lstrip("/")).exists() or program == "/bin/kill", (unit.name, program)
    for name in ("sysusers.d", "tmpfiles.d"):
        assert (image / "usr" / "lib" / name / "probingd.conf").exists()
    assert os.access(image / "usr/lib/systemd/system-generators/probingd", os.X_OK)
    assert (image / "etc" / "probingd" / "probingd.toml").exists()


@pytest.mark.timeout(900)
def test_the_deb_has_what_a_host_needs(image: Path, tmp_path: Path) -> None:
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "OUT": str(tmp_path), "VERSION": "0.23.7"}
    subprocess.run([ROOT / "packaging" / "package.sh", "deb", image], env=env, check=True, capture_output=True)
    (deb,) = tmp_path.glob("*.deb")

    def said(*words: str | Path) -> str:
        return subprocess.run(["dpkg-deb", *words], check=True, capture_output=True, text=True).stdout

    python = (image / PREFIX.lstrip("/") / "bin" / "python").resolve().name
    assert re.fullmatch(r"python3\.\d+", python)
    fields = said("--field", deb, "Version", "Depends").splitlines()
    needed = f"{python}, libbpf1, util-linux, systemd | systemd-standalone-sysusers"
    assert fields == ["Version: 0.23.7", f"Depends: {needed}"]
    files = {line.split()[5] for line in said("--contents", deb).splitlines()}
    units = {f"./usr/lib/systemd/system/{name}" for name in units_of("systemd")}
    units |= {f"./usr/lib/systemd/user/{name}" for name in units_of("systemd/user")}
    others = {f".{PREFIX}/bin/probingd", "./usr/share/bash-completion/completions/probingctl"}
    others |= {f"./usr/share/man/man{page[-1]}/{page}.gz" for page in ("probingctl.1", "probingd.toml.5", "probingd.8")}
    assert units | others <= files
    assert not [path for path in files if "/pip/" in path or path.endswith(".a") or "/pyarrow/tests/" in path]
    said("--control", deb, tmp_path / "control")
    assert (tmp_path / "control" / "conffiles").read_text() == "/etc/probingd/probingd.toml\n"
    for name in ("postinst", "prerm", "postrm"):
        subprocess.run(["sh", "-n", tmp_path / "control" / name], check=True)


@pytest.mark.timeout(900)
def test_a_configuration_is_kept_and_the_rest_goes(image: Path) -> None:
    config = image / "etc" / "probingd" / "probingd.toml"
    config.write_text('node_name = "mine"\n')
    make("install", image)
    assert config.read_text() == 'node_name = "mine"\n'
    make("uninstall", image)
    assert [path for path in image.rglob("*") if not path.is_dir()] == [config]
