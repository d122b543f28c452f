/* Python's memory that Go reads or writes while Python continues. Only addresses and lengths are passed to Go; the
 * caller keeps the objects that own the memory alive until Go reports that it no longer uses the memory. (A buffer
 * object would keep them alive by itself, but buffer objects are not part of the limited API of 3.10.) */
#include "torchft.h"

#include <stdlib.h>
#include <string.h>

extern int64_t tft_register_memory(int64_t *pairs, int64_t count, char **error); /* go/native/memory.go */

/* register_memory(pairs): registers regions of memory, and returns a handle. `pairs` are bytes: the address and the length
 * of each region as int64, in this machine's byte order. */
PyObject *tft_register_memory_args(PyObject *module, PyObject *args) {
  if (tft_forked())
    return tft_raise_forked();
  const char *bytes = NULL;
  Py_ssize_t length = 0;
  if (!PyArg_ParseTuple(args, "y#", &bytes, &length))
    return NULL;
  if (length % (Py_ssize_t)(2 * sizeof(int64_t)) != 0) {
    PyErr_SetString(PyExc_ValueError, "register_memory(pairs): pairs of an int64 address and an int64 length");
    return NULL;
  }
  int64_t *pairs = malloc(length > 0 ? (size_t)length : 1); /* bytes need not be aligned */
  if (pairs == NULL)
    return PyErr_NoMemory();
  memcpy(pairs, bytes, (size_t)length);
  char *error = NULL;
  int64_t handle = tft_register_memory(pairs, (int64_t)(length / sizeof(int64_t)), &error);
  free(pairs);
  if (error != NULL) {
    tft_raise(error);
    free(error);
    return NULL;
  }
  return PyLong_FromLongLong(handle);
}
