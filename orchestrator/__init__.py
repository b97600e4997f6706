"""The controller: on the laptop. Never imports torch."""
