"""Copies of states that outlive trainers.

`slots` is their format in memory, `choice` decides which step a group restores.
"""
