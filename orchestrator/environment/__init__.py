"""A container's Python and CUDA environment: collected, kept as a lock file, compared, repaired."""
