"""Copies of a rank's state that outlive it, and how a group begins with one.

rate: when a copy is due (pure). copies: makes them, beside the training. search: finds
what a group can begin with. restore: its ranks choose one, and load it.
"""
