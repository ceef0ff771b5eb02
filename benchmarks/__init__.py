"""What `make bench` runs: medians of several, ratios against a peer in the same run, written to docs/performance.md."""
