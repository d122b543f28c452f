"""What Gloo and PyTorch's wrapper of it do not do by themselves, each in a file of its own.

None has an issue upstream that we know of; each file says what was seen, with PyTorch 2.7 to 2.15.

======================  ===========================================================  ===============================
file                    why it exists                                                can go when
======================  ===========================================================  ===============================
connections             an abort leaves operations in flight: their sockets, found   `abort` of Gloo's backend ends
                        in /proc and the store, are shut down                        operations in flight
operations              some operations do not end even then; whoever waits looks    the same holds for each of
                        at an end of ours too                                        them, `recv` from any included
stillness               a send that the end of its connection does not wake: its     such a send is woken
                        thread sleeps, so that the step can be reduced again
loops                   its event loop turns at full speed on a cut connection that  it closes a connection that is
                        still holds data                                             cut behind unread data
reaper                  destroying a group joins threads that sit in an operation;   a destructor that does not
                        PyTorch 2.7 keeps the GIL meanwhile                          wait, and 2.7 is not supported
scheduling              the event loop's thread takes the processor from the thread  it waits for the lock of a
                        that sends                                                   connection instead of polling
csrc/ending.c           a thread of a group that outlives the interpreter ends the   such threads end with their
                        process by std::terminate                                    group, or before the exit
======================  ===========================================================  ===============================

Only groups of Gloo need this: `ProcessGroupGloo`, the worker of `ProcessGroupBabyGloo`, and native groups on Gloo.
"""
