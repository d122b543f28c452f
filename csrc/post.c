/* Requests that are made at every step. After a Python thread has called into Go, Go counts one of its processors as
 * "in a system call", and its monitor thread checks on it every 20 microseconds for some milliseconds. That costs more
 * than the request. So these requests go through a pipe that a goroutine reads, and their results come back by a call
 * from Go to C. An ordinary call has prepared beforehand what is the same in all requests. */
#include "event.h"
#include "torchft.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NUMBERS 3

/* A message in the pipe. A write of less than PIPE_BUF bytes is atomic. go/native/posts.go reads the same layout. */
typedef struct {
  int64_t call;     /* address of a tft_call */
  int64_t prepared; /* handle of the prepared request; 0: cancel the call */
  int64_t numbers[NUMBERS];
} message;

struct tft_call {
  tft_event event;
  pthread_mutex_t mutex;
  int owners; /* Python's capsule, and Go until the call ends */
  int handed_out; /* the GIL guards it */
  int state;
  int64_t number;
  char *text;
  int64_t length;
};

extern int tft_posts_open(void); /* go/native/posts.go */

static const char *const NAME = "torchft call";
static int pipe_end = -1; /* the GIL guards it */

static int send_message(const message *m) {
  if (pipe_end < 0 && (pipe_end = tft_posts_open()) < 0) {
    PyErr_SetString(PyExc_RuntimeError, "torchft: no pipe could be made, too many open files");
    return -1;
  }
  ssize_t n;
  do
    n = write(pipe_end, m, sizeof *m);
  while (n < 0 && errno == EINTR);
  if (n == (ssize_t)sizeof *m)
    return 0;
  PyErr_Format(PyExc_RuntimeError, "torchft: the native core takes no more requests: %s", strerror(errno));
  return -1;
}

static void release(tft_call *call) {
  pthread_mutex_lock(&call->mutex);
  int left = --call->owners;
  pthread_mutex_unlock(&call->mutex);
  if (left > 0)
    return;
  free(call->text);
  tft_event_destroy(&call->event);
  pthread_mutex_destroy(&call->mutex);
  free(call);
}

/* In a forked child the call belongs to the parent, and its mutex may be held by a thread that the child lacks. */
static void release_capsule(PyObject *capsule) {
  if (!tft_forked())
    release(PyCapsule_GetPointer(capsule, NAME));
}

/* Called by Go, once for each call. */
void tft_call_end(tft_call *call, int state, int64_t number, char *text, int64_t length) {
  call->state = state;
  call->number = number;
  call->text = text;
  call->length = length;
  tft_event_set(&call->event);
  release(call);
}

static tft_call *new_call(void) {
  tft_call *call = calloc(1, sizeof *call);
  if (call == NULL) {
    PyErr_NoMemory();
    return NULL;
  }
  tft_event_init(&call->event);
  pthread_mutex_init(&call->mutex, NULL);
  call->owners = 1;
  return call;
}

/* post(prepared, *numbers): start a call; the result is for collect. */
PyObject *tft_post(PyObject *module, PyObject *args) {
  if (tft_forked())
    return tft_raise_forked();
  message m = {0};
  Py_ssize_t n = PyTuple_Size(args);
  if (n < 1 || n > 1 + NUMBERS) {
    PyErr_Format(PyExc_TypeError, "post(prepared, *numbers): at most %d numbers", NUMBERS);
    return NULL;
  }
  m.prepared = PyLong_AsLongLong(PyTuple_GetItem(args, 0));
  for (Py_ssize_t i = 1; i < n; i++)
    m.numbers[i - 1] = PyLong_AsLongLong(PyTuple_GetItem(args, i));
  if (PyErr_Occurred())
    return NULL;
  if (m.prepared <= 0) { /* Go would read it as a cancelled call, and never answer this one */
    PyErr_SetString(PyExc_RuntimeError, "this object is shut down");
    return NULL;
  }
  tft_call *call = new_call();
  if (call == NULL)
    return NULL;
  PyObject *capsule = PyCapsule_New(call, NAME, release_capsule);
  if (capsule == NULL) {
    release(call);
    return NULL;
  }
  m.call = (int64_t)(intptr_t)call;
  call->owners = 2;
  if (send_message(&m) < 0) {
    call->owners = 1; /* Go has not received it */
    Py_DECREF(capsule);
    return NULL;
  }
  return capsule;
}

/* collect(call): wait for the result, which is returned only once; Ctrl-C cancels the call. */
PyObject *tft_collect(PyObject *module, PyObject *args) {
  if (tft_forked())
    return tft_raise_forked();
  PyObject *capsule = NULL;
  if (!PyArg_ParseTuple(args, "O", &capsule))
    return NULL;
  tft_call *call = PyCapsule_GetPointer(capsule, NAME);
  if (call == NULL)
    return NULL;
  for (;;) {
    int ended;
    const long slice = tft_slice_ms();
    Py_BEGIN_ALLOW_THREADS
    ended = tft_event_wait(&call->event, slice);
    Py_END_ALLOW_THREADS
    if (ended) {
      if (call->handed_out) {
        PyErr_SetString(PyExc_RuntimeError, "collect(call): the result was handed out already");
        return NULL;
      }
      call->handed_out = 1;
      char *text = call->text;
      call->text = NULL;
      return tft_result(call->state, call->number, text, call->length);
    }
    if (PyErr_CheckSignals() < 0) {
      PyObject *type, *value, *traceback;
      PyErr_Fetch(&type, &value, &traceback);
      const message cancelled = {.call = (int64_t)(intptr_t)call};
      if (send_message(&cancelled) < 0)
        PyErr_Clear(); /* the call ends at its deadline */
      PyErr_Restore(type, value, traceback);
      return NULL;
    }
  }
}
