"""Poolgate's supervisor: starts, watches and stops the `vllm serve` processes of one host."""
