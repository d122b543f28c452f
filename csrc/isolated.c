/* torchft.process_group.isolated._native: copies between the caller's memory and memory that a worker maps. It is a
 * separate library, because the worker must not load Go. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>
#include <time.h>

#include "ending.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define RELEASE_ABOVE (1 << 16) /* bytes: a larger copy releases the GIL, which costs less time than the copy */

#define CACHE_LINE 64
#define LARGE (1 << 21) /* bytes: more than the cache of a single core */

/* Copies with stores that bypass the caches. An ordinary store first reads its cache line from memory, while all ranks
 * of a host copy at the same time and are limited by memory bandwidth. memcpy does the same, but only above a size that
 * it derives from all caches of the machine: 288 MB on an EPYC, of which a virtual machine has only a small part. */
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

/* The processor time of this thread, which other processes of the host do not prolong. */
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Copies with memcpy or past the caches, whichever is faster here: memcpy by a factor of 2 on a Xeon whose cores share
 * 260 MB of cache. The first eight copies try memcpy, then the other; of each, the first two only fill the caches. To be
 * called with the GIL. */
static void copy_large(char *to, const char *source, size_t size) {
  static double taken[2]; /* seconds per byte of memcpy, and past the caches */
  static int tried;
  const int trial = tried < 8 ? tried++ : 8, past = trial < 8 ? trial / 4 : taken[1] < taken[0];
  double took;
  Py_BEGIN_ALLOW_THREADS
  took = now();
  if (past)
    copy_streaming(to, source, size);
  else
    memcpy(to, source, size);
  took = (now() - took) / (double)size;
  Py_END_ALLOW_THREADS
  if (trial < 8 && trial % 4 >= 2)
    taken[past] += took;
}

/* copy(to, source, size): copies `size` bytes between two addresses. The two ranges must not overlap. */
static PyObject *copy(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  int64_t v[3];
  if (n != 3) {
    PyErr_SetString(PyExc_TypeError, "copy(to, source, size)");
    return NULL;
  }
  for (Py_ssize_t i = 0; i < n; i++) {
    v[i] = PyLong_AsLongLong(args[i]);
    if (v[i] == -1 && PyErr_Occurred())
      return NULL;
  }
  void *to = (void *)(intptr_t)v[0], *source = (void *)(intptr_t)v[1];
  const size_t size = (size_t)v[2];
  if (size < RELEASE_ABOVE) {
    memcpy(to, source, size);
  } else if (size < LARGE) {
    Py_BEGIN_ALLOW_THREADS
    memcpy(to, source, size);
    Py_END_ALLOW_THREADS
  } else {
    copy_large(to, source, size);
  }
  Py_RETURN_NONE;
}

#define FAST(f) ((PyCFunction)(void (*)(void))(f))

static PyMethodDef methods[] = {
    {"copy", FAST(copy), METH_FASTCALL, "copy(to, source, size): copies memory, given by addresses."},
    {"stop_threads_that_come_back", stop_threads_that_come_back, METH_NOARGS,
     "stop_threads_that_come_back(): see ending.h."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
