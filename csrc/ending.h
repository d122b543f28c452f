/* Threads that come back from C++ when the interpreter ends.
 *
 * A daemon thread that waits in PyTorch (or a thread of PyTorch's own that calls back into Python) may want the GIL when
 * Python has begun to end. Before Python 3.14 it is ended there and then, by unwinding its stack. C++ does not let that
 * pass through a destructor or a handler of exceptions, and aborts the whole process: a training that was over ends with
 * SIGABRT. */
#ifndef TORCHFT_ENDING_H
#define TORCHFT_ENDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* To be called by the main thread when nothing is left but to end: from then on such a thread stands still until the
 * process has ended, as it would from Python 3.14 on. Does nothing where there is no libstdc++. */
PyObject *stop_threads_that_come_back(PyObject *module, PyObject *nothing);

#endif
