"""One step of one rank.

step: its data, and how it ends. sharing: which optimizers share it (pure). collectives: those that it runs,
and aborted ones of earlier steps. work: the futures that an allreduce returns. background: the training
thread's device, and the stream of a heal. errors: which error of a step is kept, and what it ends. failures:
failures of peers end collectives. replay: whether a failed step is reduced again, with the copies that inputs
keeps. again: keeps them for a loader, whose step comes again with what is missing. uncommitted: when a rank
says that it commits nothing (pure).
"""
