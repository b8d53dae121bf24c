"""A job on the page: its diagnosis, its findings so far, who waits for whom, and its steps."""

from __future__ import annotations

from typing import Any

from probing.client.render.rows import Row
from probing.client.web.panels import Question

__all__ = ("diagnose", "history")

_HISTORY = "7d"


def diagnose(question: Question) -> Row:
    """Returns the object of ``diagnose -f json``; empty where no job was found."""
    from probing.client.diagnosis.asking import diagnosed, gathered, with_stored_findings
    from probing.client.diagnosis.page import as_object

    cluster = question.cluster
    found = with_stored_findings(cluster, diagnosed(gathered(cluster, question.parameters.job_or_all(cluster))))
    return as_object(found) if found else {}


def history(question: Question) -> list[dict[str, Any]]:
    """Returns the rows of ``diagnose --history -f json``, of the last seven days unless ``since`` says more."""
    from probing.client.diagnosis.history import history as rows

    cluster, parameters = question.cluster, question.parameters
    return rows(cluster, parameters.job_or_all(cluster), parameters.interval(_HISTORY), whole=True)
