/* Threads that return from C++ to Python while the interpreter exits.
 *
 * A daemon thread that waits in PyTorch, or one of PyTorch's own threads that calls back into Python, may request the
 * GIL when the interpreter already exits. Before Python 3.14 Python then ends this thread at once by unwinding its
 * stack. C++ does not allow that through a destructor or an exception handler, and aborts the whole process: a training
 * job that has finished its work ends with SIGABRT. */
#ifndef TORCHFT_ENDING_H
#define TORCHFT_ENDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* To be called by the main thread as the last thing before the interpreter exits. From then on such a thread sleeps
 * until the process has ended, as it would from Python 3.14 on. Does nothing where there is no libstdc++. */
PyObject *stop_threads_that_come_back(PyObject *module, PyObject *nothing);

#endif
