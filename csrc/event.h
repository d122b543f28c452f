/* A flag that one thread waits for and another sets, without the GIL and outside of Go. */
#ifndef TORCHFT_EVENT_H
#define TORCHFT_EVENT_H

#include <pthread.h>
#include <stdint.h>

typedef struct {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int set;
} tft_event;

void tft_event_init(tft_event *event);
void tft_event_set(tft_event *event);
/* Waits at most milliseconds for the flag; returns whether it is set. */
int tft_event_wait(tft_event *event, long milliseconds);
void tft_event_destroy(tft_event *event);

/* A call that was started through the pipe of vote.c. */
typedef struct tft_call tft_call;
void tft_call_end(tft_call *call, int state, int64_t number, char *text, int64_t length);

#endif
