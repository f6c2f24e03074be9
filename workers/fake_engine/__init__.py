"""A stand-in for `vllm serve` that tests and load runs start in its place; `options.py` lists its flags and faults."""
