"""What docs/generate.py writes the reference from, a module for each kind of page."""
