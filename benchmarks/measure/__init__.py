"""How measurements are made and shown: clocks, whole models, tables, least times, fairness."""
