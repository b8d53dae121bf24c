"""Diagnosis of jobs: pure rules over facts, shared by the daemon and the client."""
