"""One run as one self-contained HTML page."""
