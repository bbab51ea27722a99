"""What the tools under ``tools/`` share: exact values, clocks, tables and pictures."""
