"""What a training shows while it runs, and notes for whoever continues it or uses its weights."""
