"""Writes diagnoses as an HTML page, if ``-o`` names an HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from probing.client.render.output import write_bytes
from probing.client.settings import Settings

if TYPE_CHECKING:
    from probing.diagnosis.ladder import Diagnosis

__all__ = ("PAGES", "is_page", "write_page")

PAGES = (".html", ".htm")


def is_page(settings: Settings) -> bool:
    """Returns whether ``-o`` names an HTML file and ``-f`` is not given."""
    return settings.output is not None and not settings.named and settings.output.name.lower().endswith(PAGES)


def write_page(settings: Settings, diagnoses: Sequence[Diagnosis], heads: Sequence[str] = ()) -> None:
    """Writes the page of ``diagnoses`` to the file that ``-o`` names; ``heads``: as for ``finding_page``."""
    from probing.client.diagnosis.html import finding_page

    write_bytes(settings, finding_page(diagnoses, heads).encode(), "html", on_terminal=False)
