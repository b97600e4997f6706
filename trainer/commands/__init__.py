"""What each command of ``python -m trainer`` does: a module each, which imports what it needs."""
