"""What measurements mean: tables of models, least times, and whether times may be compared."""
