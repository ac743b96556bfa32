"""Communicators: what ranks say to each other."""
