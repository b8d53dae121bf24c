"""The views: names and columns of Probing, whose SQL runs here, and ours, over the tables of this package."""

from __future__ import annotations

from probing.api.tables import views_diagnosis, views_nccl, views_node, views_python
from probing.api.tables.schema import View

__all__ = ("VIEWS",)

VIEWS: dict[str, View] = {
    view.name: view for view in (*views_python.VIEWS, *views_nccl.VIEWS, *views_node.VIEWS, *views_diagnosis.VIEWS)
}
