"""A shim for tools that still call setup.py; pyproject.toml holds everything."""

from setuptools import setup

setup()
