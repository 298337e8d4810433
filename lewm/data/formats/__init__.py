"""Datasets of other kinds, and what a person does with a dataset: check it, convert it, look at it."""
