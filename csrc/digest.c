/* The digest of host memory. torchft/checkpointing/codec/digest.py defines digests, and computes those of other memory. */
#include "torchft.h"

#include <string.h>

#define WORD ((Py_ssize_t)sizeof(int32_t))

/* The sum of word[i] * weight[i] modulo 2**64. Words are signed; the missing bytes of the last one are zeros. */
static uint64_t chunk(const char *memory, Py_ssize_t length, const uint64_t *weights) {
  uint64_t sum = 0;
  int32_t word = 0;
  for (Py_ssize_t i = 0; i < length / WORD; i++) {
    memcpy(&word, memory + i * WORD, WORD); /* memory need not be aligned */
    sum += (uint64_t)(int64_t)word * weights[i];
  }
  if (length % WORD == 0)
    return sum;
  word = 0;
  memcpy(&word, memory + length - length % WORD, length % WORD);
  return sum + (uint64_t)(int64_t)word * weights[length / WORD];
}

/* digest(memory, length, weights, words): the digest of `length` bytes at the address `memory`, as an int64. At the address
 * `weights` is the uint64 weight of each word of a chunk; `words` is their number. The caller keeps both alive. */
PyObject *tft_digest(PyObject *module, PyObject *args) {
  unsigned long long memory = 0, weights = 0;
  Py_ssize_t length = 0, words = 0;
  if (!PyArg_ParseTuple(args, "KnKn", &memory, &length, &weights, &words))
    return NULL;
  if (length < 0 || words < 1) {
    PyErr_SetString(PyExc_ValueError, "digest(memory, length, weights, words): a length of 0 or more, and 1 word or more");
    return NULL;
  }
  const char *bytes = (const char *)(uintptr_t)memory;
  const uint64_t *weight = (const uint64_t *)(uintptr_t)weights;
  const Py_ssize_t most = words * WORD;
  uint64_t sum = 0;
  Py_BEGIN_ALLOW_THREADS;
  if (length <= most)
    sum = chunk(bytes, length, weight);
  else
    for (Py_ssize_t number = 0; number * most < length; number++) {
      Py_ssize_t left = length - number * most;
      uint64_t factor = weight[number % words] * (uint64_t)(2 * (number / words) + 1);
      sum += chunk(bytes + number * most, left < most ? left : most, weight) * factor;
    }
  Py_END_ALLOW_THREADS;
  return PyLong_FromLongLong((int64_t)sum);
}
