/* The part of CPython's limited API of 3.10 that this library uses, so that a build needs no headers of Python. All of it is
 * in the stable ABI of every later one. tests/unit/test_python_header.py compares it with CPython's own headers. */
#ifndef Py_PYTHON_H
#define Py_PYTHON_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#define PY_VERSION_HEX 0x030A0000
#define PyMODINIT_FUNC __attribute__((visibility("default"))) PyObject *

typedef ssize_t Py_ssize_t;
typedef struct _object PyObject;
typedef struct _typeobject PyTypeObject;
typedef struct _ts PyThreadState;

extern PyObject _Py_NoneStruct;
extern PyObject *PyExc_ImportError, *PyExc_RuntimeError, *PyExc_TimeoutError, *PyExc_TypeError, *PyExc_ValueError;

void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *);
#define Py_DECREF(object) Py_DecRef(object)
#define Py_XDECREF(object) Py_DecRef(object) /* which takes NULL, too */
#define Py_RETURN_NONE return Py_IncRef(&_Py_NoneStruct), &_Py_NoneStruct

PyThreadState *PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState *);
#define Py_BEGIN_ALLOW_THREADS \
  { \
    PyThreadState *_save = PyEval_SaveThread();
#define Py_END_ALLOW_THREADS \
    PyEval_RestoreThread(_save); \
  }

/* Modules. */
typedef PyObject *(*PyCFunction)(PyObject *, PyObject *);
typedef struct PyMethodDef {
  const char *ml_name;
  PyCFunction ml_meth;
  int ml_flags;
  const char *ml_doc;
} PyMethodDef;
#define METH_VARARGS 0x0001
#define METH_KEYWORDS 0x0002
#define METH_NOARGS 0x0004
#define METH_FASTCALL 0x0080

typedef struct PyModuleDef_Base {
  Py_ssize_t ob_refcnt; /* of a PyObject */
  PyTypeObject *ob_type;
  PyObject *(*m_init)(void);
  Py_ssize_t m_index;
  PyObject *m_copy;
} PyModuleDef_Base;
typedef struct PyModuleDef {
  PyModuleDef_Base m_base;
  const char *m_name;
  const char *m_doc;
  Py_ssize_t m_size;
  PyMethodDef *m_methods;
  void *m_slots;
  void *m_traverse;
  void *m_clear;
  void *m_free;
} PyModuleDef;
#define PyModuleDef_HEAD_INIT {1, NULL, NULL, 0, NULL}
PyObject *PyModule_Create2(PyModuleDef *, int);
#define PyModule_Create(definition) PyModule_Create2(definition, 3) /* the version of the stable ABI */
int PyModule_AddFunctions(PyObject *, PyMethodDef *);

/* Arguments and results. The functions with _SizeT take lengths as Py_ssize_t. */
int _PyArg_ParseTuple_SizeT(PyObject *, const char *, ...);
int _PyArg_ParseTupleAndKeywords_SizeT(PyObject *, PyObject *, const char *, char **, ...);
PyObject *_Py_BuildValue_SizeT(const char *, ...);
#define PyArg_ParseTuple _PyArg_ParseTuple_SizeT
#define PyArg_ParseTupleAndKeywords _PyArg_ParseTupleAndKeywords_SizeT
#define Py_BuildValue _Py_BuildValue_SizeT
PyObject *PyBool_FromLong(long);
PyObject *PyLong_FromLongLong(long long);
long long PyLong_AsLongLong(PyObject *);
PyObject *PyUnicode_DecodeUTF8(const char *, Py_ssize_t, const char *);
PyObject *PyUnicode_FromStringAndSize(const char *, Py_ssize_t);
Py_ssize_t PyTuple_Size(PyObject *);
PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
PyObject *PyTuple_GetSlice(PyObject *, Py_ssize_t, Py_ssize_t);
int PyObject_IsTrue(PyObject *);
PyObject *PyObject_CallObject(PyObject *, PyObject *);
int PyObject_SetAttrString(PyObject *, const char *, PyObject *);

/* Exceptions. */
int PyErr_CheckSignals(void);
PyObject *PyErr_Occurred(void);
PyObject *PyErr_NoMemory(void);
PyObject *PyErr_Format(PyObject *, const char *, ...);
void PyErr_SetString(PyObject *, const char *);
void PyErr_Clear(void);
void PyErr_Fetch(PyObject **, PyObject **, PyObject **);
void PyErr_NormalizeException(PyObject **, PyObject **, PyObject **);
void PyErr_Restore(PyObject *, PyObject *, PyObject *);

#endif
