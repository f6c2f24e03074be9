"""What Poolgate's data path costs beside other proxies, measured in one run: `make bench`, docs/benchmarks.md."""
