"""The tables of the pages, made from the runs."""
