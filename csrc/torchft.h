/* The parts that the generated binding cannot express, or not fast enough: exception classes, the fork guard, waits that
 * Ctrl-C ends, digests, and module init. Everything here uses CPython's limited API of 3.10 (Python.h beside this file), so one binary serves all later ones. */
#ifndef TORCHFT_H
#define TORCHFT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* errors.c: sets the exception for a message with a class prefix, "T:", "R:" or "V:". With "R=ended:" it has the
 * attribute refusal, "ended". */
void tft_raise(const char *message);

/* fork.c: Go's threads do not exist in a forked child, so that a call into Go could wait there for ever. */
int tft_fork_guard_install(void);
int tft_forked(void);
PyObject *tft_raise_forked(void);

/* wait.c */
long tft_slice_ms(void); /* how long to wait before looking for signals */
PyObject *tft_result(int state, int64_t number, char *text, int64_t length); /* frees text */
PyObject *tft_run(PyObject *module, PyObject *args);
PyObject *tft_open(PyObject *module, PyObject *args);
PyObject *tft_wait(PyObject *module, PyObject *args);

/* vote.c */
PyObject *tft_vote(PyObject *module, PyObject *args);

/* digest.c */
PyObject *tft_digest(PyObject *module, PyObject *args);

/* memory.c */
PyObject *tft_register_memory_args(PyObject *module, PyObject *args);

#endif
