"""Copies of states that outlive trainers.

`slots` is their format in memory, `shares` says which parts of a state a group keeps, and `reading` makes a
whole of the slots of this and of other hosts (`remote`).
"""
