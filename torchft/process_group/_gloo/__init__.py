"""Workarounds for Gloo and PyTorch's wrapper of it, each in a separate file.

We know of no upstream issue for any of them. Each file describes the behaviour that was seen, with PyTorch 2.7 to 2.15.

======================  ===========================================================  ===============================
file                    why it exists                                                not needed if
======================  ===========================================================  ===============================
connections             an abort leaves operations in flight: their sockets, found   `abort` of Gloo's backend ends
                        in /proc and the store, are shut down                        operations in flight
operations              some operations do not end even then; a wait for one also    the same holds for each of
                        ends after an abort, or when connections are broken          them, `recv` from any included
quiescence               the end of a connection may not wake a send; if its thread   such a send is woken
                        sleeps, the step can be reduced again
loops                   Gloo's event loop spins on a cut connection that still       it closes a connection that is
                        holds data                                                   cut behind unread data
reaper                  destroying a group joins threads that are in an operation;   a destructor does not wait, and
                        PyTorch 2.7 keeps the GIL meanwhile                          PyTorch 2.7 is not supported
scheduling              the event loop's thread takes the processor from the thread  it waits for the lock of a
                        that sends                                                   connection instead of polling
csrc/ending.c           a thread of a group that outlives the interpreter ends the   such threads end with their
                        process by std::terminate                                    group, or before the exit
======================  ===========================================================  ===============================

Only groups of Gloo need this: `ProcessGroupGloo`, the worker of `ProcessGroupBabyGloo`, and native groups on Gloo.
"""
