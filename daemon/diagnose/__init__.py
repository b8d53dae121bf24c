"""Diagnosis in the daemon: gathers facts, runs the rules, stores and follows the findings."""
