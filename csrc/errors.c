#include "torchft.h"

#include <string.h>

void tft_raise(const char *message) {
  PyObject *type = PyExc_RuntimeError;
  const char class = message[0], *text = message, *refusal = NULL;
  const char *colon = class == '\0' ? NULL : strchr(message, ':');
  if (colon != NULL && (colon == message + 1 || message[1] == '=')) {
    text = colon + 1;
    refusal = message[1] == '=' ? message + 2 : NULL;
    type = class == 'T' ? PyExc_TimeoutError : class == 'V' ? PyExc_ValueError : type;
  }
  PyErr_SetString(type, text);
  if (refusal == NULL)
    return;
  PyObject *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  PyObject *name = PyUnicode_FromStringAndSize(refusal, colon - refusal);
  if (name == NULL || PyObject_SetAttrString(error, "refusal", name) < 0)
    PyErr_Clear(); /* without it, the error is one as any other */
  if (name != NULL)
    Py_DECREF(name);
  PyErr_Restore(type, error, trace);
}
