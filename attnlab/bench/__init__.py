"""Measuring: correct first, then timed."""
