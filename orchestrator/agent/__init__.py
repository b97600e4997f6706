"""The program inside container and host: standard library and vendored libtmux, Python >= 3.10."""
