"""The drafter: its configuration, its model, its attention mask and its checkpoint forms."""
