/* torchft.process_group.isolated._native: copies between the caller's memory and memory that a worker maps. It is a
 * separate library, because the worker must not load Go. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "ending.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define RELEASE_ABOVE (1 << 16) /* bytes: a larger copy releases the GIL, which costs less time than the copy */

#define CACHE_LINE 64
#define STREAM_ABOVE (1 << 21) /* bytes: more than the cache of a single core */

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

#define FAST(f) ((PyCFunction)(void (*)(void))(f))

static PyMethodDef methods[] = {
    {"copy", FAST(copy), METH_FASTCALL, "copy(to, source, size): copies memory, given by addresses."},
    {"stop_threads_that_come_back", stop_threads_that_come_back, METH_NOARGS,
     "stop_threads_that_come_back(): see ending.h."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
