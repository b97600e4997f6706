"""The torch pipeline: in the container. Never imports orchestrator."""
