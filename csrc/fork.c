#include "torchft.h"

#include <pthread.h>

static volatile int forked = 0;

static void in_child(void) { forked = 1; }

/* Registered when the library is loaded, so a process that loads it only after its fork may use it. */
int tft_fork_guard_install(void) {
  static int installed = 0;
  if (!installed && pthread_atfork(NULL, NULL, in_child) != 0) {
    PyErr_SetString(PyExc_ImportError, "torchft: pthread_atfork failed, out of memory");
    return -1;
  }
  installed = 1;
  return 0;
}

int tft_forked(void) { return forked; }

PyObject *tft_raise_forked(void) {
  PyErr_SetString(PyExc_RuntimeError,
                  "torchft's native library was loaded before this process was forked, and its threads do not "
                  "exist in a forked child; use the 'spawn' or 'forkserver' start method (for a DataLoader: "
                  "multiprocessing_context=\"spawn\"), or use torchft in the parent only");
  return NULL;
}
