"""Puts this folder on the path of every test, for what they share."""
