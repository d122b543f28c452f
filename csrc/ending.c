#include "ending.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

/* Seconds that a thread sleeps before it aborts the process all the same: the main thread may be waiting for it. */
#define LONGEST_END_S 30

typedef void (*handler)(void);

static pthread_t main_thread;
static handler before;

static void sleep_until_exit(void) {
  if (!pthread_equal(pthread_self(), main_thread))
    for (unsigned int left = LONGEST_END_S; left > 0;)
      left = sleep(left);
  if (before != NULL)
    before();
  abort();
}

PyObject *stop_threads_that_come_back(PyObject *module, PyObject *nothing) {
  void *library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
  /* std::set_terminate(void (*)()) */
  handler (*set_terminate)(handler) =
      library == NULL ? NULL : (handler(*)(handler))dlsym(library, "_ZSt13set_terminatePFvvE");
  if (set_terminate != NULL && before == NULL) {
    main_thread = pthread_self();
    before = set_terminate(sleep_until_exit);
  }
  Py_RETURN_NONE;
}
