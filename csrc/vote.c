/* A vote on a step. After a Python thread has called into Go, Go counts one of its processors as "in a system call", and
 * its monitor thread checks on it every 20 microseconds for some milliseconds. That costs more than the vote, which is
 * the only call of each step. So a vote goes through a pipe that a goroutine reads, and its result comes back by a call
 * from Go to C. */
#include "event.h"
#include "torchft.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A message in the pipe. A write of less than PIPE_BUF bytes is atomic. go/native/votes.go reads the same layout. */
typedef struct {
  int64_t call;   /* address of a tft_call */
  int64_t client; /* handle of the manager client; 0: cancel the call */
  int64_t group_rank;
  int64_t step;
  int64_t vote;
  int64_t timeout_us;
} message;

struct tft_call {
  tft_event event;
  pthread_mutex_t mutex;
  int owners; /* the thread that waits, and Go until the call ends */
  int state;
  int64_t number;
  char *text;
  int64_t length;
};

extern int tft_votes_open(void); /* go/native/votes.go */

static int pipe_end = -1; /* the GIL guards it */

static int send_message(const message *m) {
  if (pipe_end < 0 && (pipe_end = tft_votes_open()) < 0) {
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

/* Called by Go, once for each call. */
void tft_call_end(tft_call *call, int state, int64_t number, char *text, int64_t length) {
  call->state = state;
  call->number = number;
  call->text = text;
  call->length = length;
  tft_event_set(&call->event);
  release(call);
}

/* Waits for the result of a call; Ctrl-C cancels it. */
static PyObject *wait_for_call(tft_call *call) {
  for (;;) {
    int ended;
    const long slice = tft_slice_ms();
    Py_BEGIN_ALLOW_THREADS
    ended = tft_event_wait(&call->event, slice);
    Py_END_ALLOW_THREADS
    if (ended) {
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

PyObject *tft_vote(PyObject *module, PyObject *args) {
  if (tft_forked())
    return tft_raise_forked();
  long long client, group_rank, step, timeout_us;
  int vote;
  if (!PyArg_ParseTuple(args, "LLLpL", &client, &group_rank, &step, &vote, &timeout_us))
    return NULL;
  if (client <= 0) { /* Go would read it as a cancelled call, and never answer this one */
    PyErr_SetString(PyExc_RuntimeError, "this object is shut down");
    return NULL;
  }
  tft_call *call = calloc(1, sizeof *call);
  if (call == NULL)
    return PyErr_NoMemory();
  tft_event_init(&call->event);
  pthread_mutex_init(&call->mutex, NULL);
  call->owners = 2;
  const message m = {(int64_t)(intptr_t)call, client, group_rank, step, vote, timeout_us};
  PyObject *decision = NULL;
  if (send_message(&m) < 0)
    call->owners = 1; /* Go has not received it */
  else
    decision = wait_for_call(call);
  release(call);
  return decision;
}
