"""What is not ours: scans and backbones that the benchmarks of this folder time beside ours."""
