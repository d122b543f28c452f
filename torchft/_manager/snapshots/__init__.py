"""Copies of a rank's state that outlive it, and how a group begins with one.

rate: when a copy is due (pure). copies: makes them, beside the training. restore: the ranks of a group choose
one and load it.
"""
