/* Threads that return from C++ to Python while the interpreter exits.
 *
 * A daemon thread that waits in PyTorch, or one of PyTorch's own threads that calls back into Python, may request the
 * GIL while the interpreter exits. Python before 3.14 then ends the thread by unwinding its stack (pthread_exit). If a
 * C++ destructor or `catch (...)` is on that stack, the C++ runtime aborts the process: a training job that has
 * finished its work ends with SIGABRT. */
#ifndef TORCHFT_ENDING_H
#define TORCHFT_ENDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* The main thread calls it last, before the interpreter exits. A thread that requests the GIL after that sleeps until
 * the process has ended, as with Python 3.14 and newer. Does nothing without libstdc++. */
PyObject *stop_threads_that_come_back(PyObject *module, PyObject *nothing);

#endif
