"""Workarounds for Gloo and PyTorch's wrapper of it, each in a separate file.

We know of no upstream issue for any of them. Each file describes the behavior that was seen, with PyTorch
2.7 to 2.15. Why it exists, and when it is not needed any more:

- connections: an abort leaves operations in flight: their sockets, found in /proc and the store, are shut
  down. Not needed if `abort` of Gloo's backend ends operations in flight.
- operations: some operations do not end even then; a wait for one also ends after an abort, or when
  connections are broken. Not needed if the same holds for each of them, `recv` from any included.
- quiescence: the end of a connection may not wake a send; if its thread sleeps, the step can be reduced
  again. Not needed if such a send is woken.
- loops: Gloo's event loop spins on a cut connection that still holds data. Not needed if it closes a
  connection that is cut behind unread data.
- reaper: destroying a group joins threads that are in an operation; PyTorch 2.7 keeps the GIL meanwhile. Not
  needed if a destructor does not wait, and PyTorch 2.7 is not supported.
- scheduling: the event loop's thread takes the processor from the thread that sends. Not needed if it waits
  for the lock of a connection instead of polling.
- csrc/ending.c: a thread of a group that outlives the interpreter ends the process by std::terminate. Not
  needed if such threads end with their group, or before the exit.

Only groups of Gloo need this: `ProcessGroupGloo`, the worker of `ProcessGroupBabyGloo`, and native groups on
Gloo.
"""
