"""Which pool and which replica: pure decisions over frozen data."""
