"""The command `compare`: whole fits of several variants and seeds, with tables, statistics and curves."""
