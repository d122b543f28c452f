package main

/*
#include <stdint.h>
#include "event.h"
*/
import "C"

import (
	"log/slog"
	"os"
	"syscall"
	"unsafe"

	"github.com/torchft/torchft/go/pyapi/ops"
)

// message is the message that csrc/post.c writes into the pipe.
type message struct {
	call     *C.tft_call
	prepared int64 // 0: cancel the call
	numbers  [ops.Numbers]int64
}

const messageSize = int(unsafe.Sizeof(message{}))

// tft_posts_open creates the pipe for requests, and returns its write end, or -1.
//
//export tft_posts_open
func tft_posts_open() C.int {
	var ends [2]int
	if err := syscall.Pipe2(ends[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
		slog.Error("torchft: no pipe could be made", "error", err)
		return -1
	}
	go readPosts(os.NewFile(uintptr(ends[0]), "torchft requests"))
	return C.int(ends[1])
}

// readPosts serves requests until the process ends. Only csrc/post.c writes to the pipe, and only whole messages.
func readPosts(pipe *os.File) {
	calls := ops.NewCalls[*C.tft_call](func(call *C.tft_call, value any, err error) {
		state, number, text, length := toC(value, err)
		C.tft_call_end(call, state, number, text, length)
	})
	var messages [16]message
	buffer := unsafe.Slice((*byte)(unsafe.Pointer(&messages)), len(messages)*messageSize)
	for {
		n, err := pipe.Read(buffer)
		if err != nil {
			slog.Error("torchft: requests cannot be read", "error", err)
			return
		}
		for _, m := range messages[:n/messageSize] {
			serve(calls, m)
		}
	}
}

// serve handles one request. It recovers from panics: if the goroutine ended, every later request would wait for its answer for
// ever.
func serve(calls *ops.Calls[*C.tft_call], m message) {
	var err error // set by a panic, and logged then
	defer ops.Guard(&err)
	if m.prepared == 0 {
		calls.Cancel(m.call)
	} else {
		calls.Start(m.call, m.prepared, m.numbers)
	}
}
