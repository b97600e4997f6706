"""Playbooks: named sequences of steps as YAML, checked, bound to values, and run."""
