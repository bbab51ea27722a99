"""Pictures for the tools: curves, predictions, and what the methods are."""
