"""Explorers: a picture under a few controls, for notebooks. Whatever a control sets is an argument as well."""
