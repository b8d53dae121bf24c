"""All symptoms of a node. A new kind of part adds its function here."""

from __future__ import annotations

from collections.abc import Sequence

from probing.diagnosis.facts import NodeFacts
from probing.diagnosis.symptoms.gpus import gpu_symptoms
from probing.diagnosis.symptoms.host import host_symptoms
from probing.diagnosis.symptoms.network import network_symptoms
from probing.diagnosis.symptoms.storage import storage_symptoms
from probing.diagnosis.symptoms.symptom import FindSymptoms, Symptom

__all__ = ("SYMPTOMS", "symptoms_of")

SYMPTOMS: Sequence[FindSymptoms] = (gpu_symptoms, network_symptoms, storage_symptoms, host_symptoms)
_MOST = 64


def symptoms_of(node: NodeFacts) -> list[Symptom]:
    """Returns what is wrong with the parts of a node, at most 64 symptoms: those of parts that fail first."""
    found = [symptom for find in SYMPTOMS for symptom in find(node)]
    return sorted(found, key=lambda symptom: not symptom.fails)[:_MOST]
