"""A trained model: what its run left, what it predicts, and what it does inside."""
