"""Traces and the access record."""
