"""Checks that the groups of a quorum train the same model on the same data.

What must be equal in all groups is announced in their handles, and compared by torchft._agreement.

layout: all groups reduce the same tensors. calls: a new group makes the same calls. loader: all groups train
on the same batch. device: each rank has its own device. replicas: the groups have the same weights, by the
decisions of divergence; audits: they compute the same gradients, by those of audit. Neither imports torch.
"""
