"""What the bundle carries beside the agent; ``agent_bundle`` writes this module's bundled text."""

from __future__ import annotations

LIBTMUX_VERSION = "not bundled"
