"""Where replica records come from."""
