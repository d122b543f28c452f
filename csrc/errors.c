#include "torchft.h"

void tft_raise(const char *message) {
  PyObject *type = PyExc_RuntimeError;
  if (message[0] != '\0' && message[1] == ':') {
    switch (message[0]) {
    case 'T':
      type = PyExc_TimeoutError;
      message += 2;
      break;
    case 'V':
      type = PyExc_ValueError;
      message += 2;
      break;
    case 'R':
      message += 2;
      break;
    }
  }
  PyErr_SetString(type, message);
}
