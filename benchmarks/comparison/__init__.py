"""The study of methods: its runs, statistics, tables and pictures."""
