#include "torchft.h"

extern PyObject *gopy_module_init(void); /* generated */

static PyObject *is_forked(PyObject *module, PyObject *unused) { return PyBool_FromLong(tft_forked()); }

static PyMethodDef methods[] = {
    {"run", tft_run, METH_VARARGS,
     "run(start, *arguments): start an operation and wait for its result; Ctrl-C cancels it."},
    {"open", tft_open, METH_VARARGS,
     "open(owner, start, *arguments): like run; the resulting handle is stored in owner._handle."},
    {"wait", tft_wait, METH_VARARGS, "wait(op): wait for the result of an operation, once; Ctrl-C cancels it."},
    {"vote", tft_vote, METH_VARARGS,
     "vote(client, group_rank, step, vote, timeout_us): wait for the group's decision; Ctrl-C cancels the wait."},
    {"register_memory", tft_register_memory_args, METH_VARARGS, "register_memory(pairs): a handle for regions of memory, as int64 addresses and lengths."},
    {"digest", tft_digest, METH_VARARGS, "digest(memory, length, weights, words): the digest of host memory; see torchft/checkpointing/codec/digest.py."},
    {"forked", is_forked, METH_NOARGS, "forked(): whether this process was forked after the library was loaded."},
    {NULL, NULL, 0, NULL}};

PyMODINIT_FUNC PyInit__torchft_go(void) {
  PyObject *module = gopy_module_init();
  if (module == NULL)
    return NULL;
  if (tft_fork_guard_install() < 0 || PyModule_AddFunctions(module, methods) < 0) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
