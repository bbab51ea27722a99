"""The scan by every path, and the exact values that it is held to."""
