/* Calls that can wait. The Go side starts an operation and hands out its number; here the calling thread
 * waits for it in slices without the GIL, looks for signals in between, and cancels it when a signal
 * handler raises (Ctrl-C: KeyboardInterrupt). Start, wait and result are one call from Python's point of
 * view, so no signal can come between them and leave an operation behind. The GIL is released here and not in
 * Go: a daemon thread that requests it while the interpreter exits is unwound at once, and its stack must not
 * contain a Go frame then. */
#include "event.h"
#include "torchft.h"

#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Ctrl-C must end a wait within 50 ms. Half of that leaves time for the thread to be scheduled. Only the main thread
 * handles signals, so the others need not wake up for them. */
#define MAIN_SLICE_MS 25
#define SLICE_MS 1000

long tft_slice_ms(void) { return syscall(SYS_gettid) == getpid() ? MAIN_SLICE_MS : SLICE_MS; }

/* go/native/exports.go */
enum { TFT_PENDING, TFT_NONE, TFT_INT, TFT_BOOL, TFT_TEXT, TFT_ERROR };
extern int tft_op_take(int64_t op, tft_event *event, int64_t *number, char **text, int64_t *length);
extern void tft_op_cancel(int64_t op);

PyObject *tft_result(int state, int64_t number, char *text, int64_t length) {
  PyObject *value = NULL;
  switch (state) {
  case TFT_NONE:
    Py_RETURN_NONE;
  case TFT_INT:
    return PyLong_FromLongLong(number);
  case TFT_BOOL:
    return PyBool_FromLong((long)number);
  case TFT_TEXT:
    value = PyUnicode_DecodeUTF8(text, (Py_ssize_t)length, "replace");
    break;
  default:
    tft_raise(text);
    break;
  }
  free(text);
  return value;
}

/* Returns the result. Until there is one, waits for the event that the operation sets when it ends, and handles
 * signals. */
static PyObject *take(int64_t op, tft_event *event) {
  int64_t number = 0, length = 0;
  char *text = NULL;
  const long slice = tft_slice_ms();
  for (;;) {
    int state;
    Py_BEGIN_ALLOW_THREADS
    state = tft_op_take(op, event, &number, &text, &length);
    if (state == TFT_PENDING && tft_event_wait(event, slice))
      state = tft_op_take(op, event, &number, &text, &length);
    Py_END_ALLOW_THREADS
    if (state != TFT_PENDING)
      return tft_result(state, number, text, length);
    if (PyErr_CheckSignals() < 0) {
      tft_op_cancel(op);
      return NULL;
    }
  }
}

/* The event is not on the stack, because a daemon thread may be ended in `take` when the interpreter exits. Its stack
 * is then freed, while the operation may still set the event. The event on the heap remains until the process ends. */
static PyObject *wait_for(int64_t op) {
  tft_event *event = malloc(sizeof *event);
  if (event == NULL) {
    tft_op_cancel(op);
    return PyErr_NoMemory();
  }
  tft_event_init(event);
  PyObject *value = take(op, event); /* now the operation no longer refers to the event */
  tft_event_destroy(event);
  free(event);
  return value;
}

PyObject *tft_wait(PyObject *module, PyObject *args) {
  if (tft_forked())
    return tft_raise_forked();
  long long op;
  if (!PyArg_ParseTuple(args, "L", &op))
    return NULL;
  return wait_for(op);
}

/* Calls start(*arguments), which returns an operation's number, and waits for its result. */
static PyObject *start_and_wait(PyObject *start, PyObject *arguments) {
  PyObject *started = PyObject_CallObject(start, arguments);
  if (started == NULL)
    return NULL;
  int64_t op = PyLong_AsLongLong(started);
  Py_DECREF(started);
  if (op == -1 && PyErr_Occurred())
    return NULL;
  return wait_for(op);
}

PyObject *tft_run(PyObject *module, PyObject *args) {
  if (tft_forked())
    return tft_raise_forked();
  Py_ssize_t n = PyTuple_Size(args);
  if (n < 1) {
    PyErr_SetString(PyExc_TypeError, "run(start, *arguments)");
    return NULL;
  }
  PyObject *arguments = PyTuple_GetSlice(args, 1, n);
  if (arguments == NULL)
    return NULL;
  PyObject *value = start_and_wait(PyTuple_GetItem(args, 0), arguments);
  Py_DECREF(arguments);
  return value;
}

/* Like run, and stores the handle in owner._handle before any signal handler can run: from then on the
 * owner's __del__ takes care of it. */
PyObject *tft_open(PyObject *module, PyObject *args) {
  if (tft_forked())
    return tft_raise_forked();
  Py_ssize_t n = PyTuple_Size(args);
  if (n < 2) {
    PyErr_SetString(PyExc_TypeError, "open(owner, start, *arguments)");
    return NULL;
  }
  PyObject *arguments = PyTuple_GetSlice(args, 2, n);
  if (arguments == NULL)
    return NULL;
  PyObject *handle = start_and_wait(PyTuple_GetItem(args, 1), arguments);
  Py_DECREF(arguments);
  if (handle == NULL)
    return NULL;
  int failed = PyObject_SetAttrString(PyTuple_GetItem(args, 0), "_handle", handle);
  Py_DECREF(handle);
  if (failed)
    return NULL;
  Py_RETURN_NONE;
}
