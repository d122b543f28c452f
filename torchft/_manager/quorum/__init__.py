"""What a rank asks the lighthouse for, and what it is told.

group: lets the ranks of a group find their manager server. rounds: requests quorums and waits for them. plan:
computes from a quorum what this rank does (without torch). notices: failures, stalls and questions of the
lighthouse meanwhile.
"""
