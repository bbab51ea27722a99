"""What the tools under ``tools/`` share: pictures of runs and predictions."""
