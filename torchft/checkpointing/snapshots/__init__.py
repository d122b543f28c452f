"""Copies of states that outlive trainers.

`slots` is their format in memory, `choice` decides which step a group restores. Where each group keeps a part
of the state, `shares` says which, and `gather` makes a whole of them.
"""
