/* torchft.process_group.isolated._native: the part of an isolated group that runs for each operation, at both ends.
 *
 * Other processes use the processor between two operations. Python code then starts with cold caches each time, and
 * takes about ten times as long as this code. It is a separate library, because the worker must not load Go.
 * protocol.py describes the messages, and handles all of them but those of ordinary operations. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "ending.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* The module can be imported on systems without isolated groups, too. */
#ifndef MSG_CMSG_CLOEXEC
#define MSG_CMSG_CLOEXEC 0
#endif
#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

/* protocol.py: request and answer begin with these */
typedef struct __attribute__((packed)) {
  uint8_t kind;
  uint64_t operation;
} request_head;

typedef struct __attribute__((packed)) {
  uint8_t kind;
  uint64_t operation;
  uint32_t length;
} answer_head;

enum { ANSWER_DONE = 1 };

#define LONGEST (1 << 15)         /* bytes; messages.py passes longer messages as a file descriptor of memory */
#define ANSWERS_AT_ONCE (1 << 14) /* bytes */
#define DESCRIPTORS 4
#define RELEASE_ABOVE (1 << 16) /* bytes: a larger copy releases the GIL, which costs less time than the copy */

#define CACHE_LINE 64
#define STREAM_ABOVE (1 << 21) /* bytes: more than the cache of a single core */

static int64_t milliseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static int wrong_arguments(const char *signature) {
  if (!PyErr_Occurred())
    PyErr_SetString(PyExc_TypeError, signature);
  return -1;
}

static int integers(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, int64_t *values, const char *signature) {
  if (given != wanted)
    return wrong_arguments(signature);
  for (Py_ssize_t i = 0; i < wanted; i++) {
    values[i] = PyLong_AsLongLong(args[i]);
    if (values[i] == -1 && PyErr_Occurred())
      return -1;
  }
  return 0;
}

/* Copies with stores that bypass the caches. The data is too large to remain in them, and an ordinary store first reads
 * its cache line from memory, while all ranks of a host copy at the same time and are limited by memory bandwidth.
 * memcpy does the same, but only above a size that it derives from all caches of the machine: 288 MB on an EPYC, of
 * which a virtual machine has only a small part. */
static void copy_streaming(char *to, const char *source, size_t size) {
#ifdef __SSE2__
  const size_t unaligned = -(uintptr_t)to % CACHE_LINE;
  memcpy(to, source, unaligned);
  to += unaligned, source += unaligned, size -= unaligned;
  for (; size >= CACHE_LINE; to += CACHE_LINE, source += CACHE_LINE, size -= CACHE_LINE) {
    const __m128i *from = (const __m128i *)source;
    __m128i *into = (__m128i *)to;
    _mm_prefetch(source + 16 * CACHE_LINE, _MM_HINT_NTA); /* a prefetch beyond the end is harmless */
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(into, a);
    _mm_stream_si128(into + 1, b);
    _mm_stream_si128(into + 2, c);
    _mm_stream_si128(into + 3, d);
  }
  _mm_sfence(); /* before the message to the other process */
#endif
  memcpy(to, source, size);
}

/* copy(to, source, size): copies `size` bytes between two addresses. The two ranges must not overlap. */
static PyObject *copy(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  int64_t v[3];
  if (integers(args, n, 3, v, "copy(to, source, size)") < 0)
    return NULL;
  void *to = (void *)(intptr_t)v[0], *source = (void *)(intptr_t)v[1];
  const size_t size = (size_t)v[2];
  if (size < RELEASE_ABOVE) {
    memcpy(to, source, size);
  } else {
    Py_BEGIN_ALLOW_THREADS
    if (size < STREAM_ABOVE)
      memcpy(to, source, size);
    else
      copy_streaming(to, source, size);
    Py_END_ALLOW_THREADS
  }
  Py_RETURN_NONE;
}

/* send(socket, kind, operation, *parts): sends at most LONGEST bytes; messages.py sends longer messages. Returns False if
 * the socket is full, because the other end does not read. */
static PyObject *send_request(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  int64_t v[3];
  if (n < 3)
    return wrong_arguments("send(socket, kind, operation, *parts)"), NULL;
  if (integers(args, 3, 3, v, "") < 0)
    return NULL;
  char message[LONGEST];
  const request_head head = {.kind = (uint8_t)v[1], .operation = (uint64_t)v[2]};
  memcpy(message, &head, sizeof head);
  size_t length = sizeof head;
  for (Py_ssize_t i = 3; i < n; i++) {
    char *part;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(args[i], &part, &size) < 0)
      return NULL;
    if (length + (size_t)size > sizeof message) {
      PyErr_SetString(PyExc_ValueError, "send: the message is too long");
      return NULL;
    }
    memcpy(message + length, part, (size_t)size);
    length += (size_t)size;
  }
  for (;;) {
    if (send((int)v[0], message, length, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
      Py_RETURN_TRUE;
    if (errno == EAGAIN)
      Py_RETURN_FALSE;
    if (errno != EINTR)
      return PyErr_SetFromErrno(PyExc_OSError);
  }
}

/* read(answers, wake, milliseconds): waits for an answer. Returns the operation's number if the answer says that it is
 * done, else the bytes of the answer; b"" if the worker has ended; None if the time is over or `wake` was set. */
static PyObject *read_answers(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  int64_t v[3];
  if (integers(args, n, 3, v, "read(answers, wake, milliseconds)") < 0)
    return NULL;
  struct pollfd ready[2] = {{.fd = (int)v[0], .events = POLLIN}, {.fd = (int)v[1], .events = POLLIN}};
  const int64_t until = milliseconds() + v[2];
  int64_t left = v[2];
  char data[ANSWERS_AT_ONCE];
  for (;;) {
    int count, failed;
    ssize_t size = 0;
    Py_BEGIN_ALLOW_THREADS
    count = poll(ready, 2, (int)(left > INT32_MAX ? INT32_MAX : left));
    if (count > 0 && ready[0].revents)
      size = read(ready[0].fd, data, sizeof data);
    failed = errno;
    Py_END_ALLOW_THREADS
    if (count < 0 || size < 0) {
      if (failed != EINTR) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
      }
      if (PyErr_CheckSignals() < 0)
        return NULL;
      left = until - milliseconds();
      if (left < 0)
        left = 0;
      continue;
    }
    if (count == 0)
      Py_RETURN_NONE;
    if (!ready[0].revents) {
      uint64_t times;
      if (read(ready[1].fd, &times, sizeof times) < 0) {
        /* another thread has already read `wake` */
      }
      Py_RETURN_NONE;
    }
    const answer_head *head = (const answer_head *)data;
    if (size == sizeof *head && head->kind == ANSWER_DONE && head->length == 0)
      return PyLong_FromUnsignedLongLong(head->operation);
    return PyBytes_FromStringAndSize(data, size);
  }
}

/* receive(socket): returns (kind, operation, rest, descriptors) of the next request; `rest` is None if the other end is
 * closed. A message that is shorter than a head (see messages.py) is returned as `rest`, with the kind 0. */
static PyObject *receive_request(PyObject *module, PyObject *socket) {
  const long fd = PyLong_AsLong(socket);
  if (fd == -1 && PyErr_Occurred())
    return NULL;
  char data[LONGEST];
  union {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(DESCRIPTORS * sizeof(int))];
  } control;
  ssize_t size;
  struct msghdr message;
  for (;;) {
    struct iovec into = {.iov_base = data, .iov_len = sizeof data};
    message = (struct msghdr){
        .msg_iov = &into, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    int failed;
    Py_BEGIN_ALLOW_THREADS
    size = recvmsg((int)fd, &message, MSG_CMSG_CLOEXEC);
    failed = errno;
    Py_END_ALLOW_THREADS
    if (size >= 0)
      break;
    if (failed != EINTR) {
      errno = failed;
      return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (PyErr_CheckSignals() < 0)
      return NULL;
  }
  PyObject *descriptors = PyTuple_New(0);
  for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c != NULL && descriptors != NULL; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
      continue;
    const Py_ssize_t count = (Py_ssize_t)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    Py_DECREF(descriptors);
    descriptors = PyTuple_New(count);
    for (Py_ssize_t i = 0; i < count && descriptors != NULL; i++) {
      int descriptor;
      memcpy(&descriptor, CMSG_DATA(c) + (size_t)i * sizeof descriptor, sizeof descriptor);
      PyTuple_SetItem(descriptors, i, PyLong_FromLong(descriptor));
    }
  }
  if (descriptors == NULL)
    return NULL;
  request_head head = {0};
  size_t begin = 0;
  if (size >= (ssize_t)sizeof head) {
    memcpy(&head, data, sizeof head);
    begin = sizeof head;
  }
  if (size == 0)
    return Py_BuildValue("iKON", 0, 0ULL, Py_None, descriptors);
  return Py_BuildValue("iKy#N", head.kind, (unsigned long long)head.operation, data + begin, (Py_ssize_t)size - (Py_ssize_t)begin,
                       descriptors);
}

/* When a thread of a C++ library calls Python, Python allocates a thread state from the system, and frees it at the end
 * of the call. An additional reference keeps this state until the thread ends. */
static void keep_thread_state(void) {
  static __thread int kept = 0;
  if (!kept) {
    kept = 1;
    PyGILState_Ensure();
  }
}

/* The callback of `answer_when_done`. It does as little as possible, because a trainer waits for it. */
static PyObject *done(PyObject *call, PyObject *future) {
  keep_thread_state();
  PyObject *in_flight = PyTuple_GetItem(call, 2), *operation = PyTuple_GetItem(call, 1);
  PyObject *value = PyObject_CallMethod(future, "value", NULL);
  if (value != NULL) {
    Py_DECREF(value);
    const int fd = (int)PyLong_AsLong(PyTuple_GetItem(call, 0));
    const answer_head head = {.kind = ANSWER_DONE, .operation = PyLong_AsUnsignedLongLong(operation), .length = 0};
    ssize_t written;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    do
      written = write(fd, &head, sizeof head);
    while (written < 0 && errno == EINTR);
    failed = errno;
    Py_END_ALLOW_THREADS
    if (written < 0 && failed == EPIPE)
      _exit(0); /* the trainer has ended, so the answer would not be read */
    if (written < 0) {
      errno = failed;
      PyErr_SetFromErrno(PyExc_OSError);
    }
  }
  if (PyErr_Occurred()) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    PyObject *result = PyObject_CallFunctionObjArgs(PyTuple_GetItem(call, 3), operation, error, NULL);
    Py_XDECREF(result);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    if (result == NULL)
      return NULL;
  }
  if (PyDict_DelItem(in_flight, operation) < 0)
    return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef done_method = {"done", done, METH_O, NULL};

/* answer_when_done(future, answers, operation, in_flight, failed): once the future has a value, writes the answer to
 * `answers`; if it has an error, calls failed(operation, error). Then removes the operation from the dict `in_flight`. */
static PyObject *answer_when_done(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  if (n != 5)
    return wrong_arguments("answer_when_done(future, answers, operation, in_flight, failed)"), NULL;
  PyObject *call = PyTuple_Pack(4, args[1], args[2], args[3], args[4]);
  if (call == NULL)
    return NULL;
  PyObject *callback = PyCFunction_New(&done_method, call);
  Py_DECREF(call);
  if (callback == NULL)
    return NULL;
  PyObject *none = PyObject_CallMethod(args[0], "add_done_callback", "O", callback);
  Py_DECREF(callback);
  return none;
}

#define FAST(f) ((PyCFunction)(void (*)(void))(f))

static PyMethodDef methods[] = {
    {"copy", FAST(copy), METH_FASTCALL, "copy(to, source, size): copies memory, given by addresses."},
    {"send", FAST(send_request), METH_FASTCALL,
     "send(socket, kind, operation, *parts): whether the request was sent; False when the other end does not read."},
    {"read", FAST(read_answers), METH_FASTCALL,
     "read(answers, wake, milliseconds): the number of an operation that is done, or other answers as bytes, or None."},
    {"receive", receive_request, METH_O, "receive(socket): (kind, operation, rest, descriptors) of the next request."},
    {"answer_when_done", FAST(answer_when_done), METH_FASTCALL,
     "answer_when_done(future, answers, operation, in_flight, failed): answers when a future completes."},
    {"stop_threads_that_come_back", stop_threads_that_come_back, METH_NOARGS,
     "stop_threads_that_come_back(): see ending.h."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
