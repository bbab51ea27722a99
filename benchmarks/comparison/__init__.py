"""Runs of several methods compared over seeds: statistics, tables and a picture."""
