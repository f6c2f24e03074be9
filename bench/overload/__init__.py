"""What callers get of engines that are asked for more than they can do: `make bench-overload`, docs/benchmarks.md."""
