"""Triton text and its launchers: launcher and kernel in one file, launcher first."""
