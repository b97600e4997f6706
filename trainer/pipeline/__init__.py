"""Executors: the same stages on one device, on threads, or on processes."""
