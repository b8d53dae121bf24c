"""Diagnosis of jobs: rules over facts, without input or output, shared by the daemon and the client."""
