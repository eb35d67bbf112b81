"""The pools: one file each."""
