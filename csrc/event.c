#include "event.h"

#include <time.h>

void tft_event_init(tft_event *event) {
  pthread_condattr_t monotonic; /* a clock that is never set back */
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_mutex_init(&event->mutex, NULL);
  pthread_cond_init(&event->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  event->set = 0;
}

void tft_event_set(tft_event *event) {
  pthread_mutex_lock(&event->mutex);
  event->set = 1;
  pthread_cond_signal(&event->changed);
  pthread_mutex_unlock(&event->mutex);
}

int tft_event_wait(tft_event *event, long milliseconds) {
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += milliseconds / 1000;
  until.tv_nsec += milliseconds % 1000 * 1000000;
  if (until.tv_nsec >= 1000000000) {
    until.tv_sec += 1;
    until.tv_nsec -= 1000000000;
  }
  pthread_mutex_lock(&event->mutex);
  while (!event->set && pthread_cond_timedwait(&event->changed, &event->mutex, &until) == 0) {
  }
  int set = event->set;
  pthread_mutex_unlock(&event->mutex);
  return set;
}

void tft_event_destroy(tft_event *event) {
  pthread_cond_destroy(&event->changed);
  pthread_mutex_destroy(&event->mutex);
}
