"""From conversations to batches of fixed shape, on a CPU, with no state to save."""
