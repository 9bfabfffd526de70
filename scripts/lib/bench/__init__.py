"""Models of memory and tools of measurement for the benchmarks."""
