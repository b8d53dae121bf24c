"""The list of all views: views with names and columns of Probing, and our own views."""

from __future__ import annotations

from probing.api.tables import views_diagnosis, views_findings, views_nccl, views_node, views_python, views_waits
from probing.api.tables.schema import View

__all__ = ("VIEWS",)

VIEWS: dict[str, View] = {
    view.name: view
    for module in (views_python, views_nccl, views_node, views_diagnosis, views_findings, views_waits)
    for view in module.VIEWS
}
