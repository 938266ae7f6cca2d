"""Penstock as a library: `penstock.map` and `penstock.connect`, which compose what the commands compose."""

import logging

# What is logged goes where the program that uses the library wants it; without its word, nowhere.
logging.getLogger("penstock").addHandler(logging.NullHandler())
