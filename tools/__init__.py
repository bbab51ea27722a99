"""What users run: `python tools/train.py`, with arguments that --help tells."""
