"""Diagnosis in the daemon: gathers facts, runs the rules, keeps the findings."""
