// Package main is the c-shared library that Python loads. It consists of the generated binding of pyapi
// (torchft_go.go and torchft_go.c, see python/binding/generate.py), the exports of this package, and csrc/.
package main

/*
#include <stdint.h>
#include "event.h"
*/
import "C"

import (
	"github.com/torchft/torchft/go/pyapi/ops"
)

// The states of an operation. csrc/wait.c has the same numbers.
const (
	statePending = iota
	stateNone
	stateInt
	stateBool
	stateText
	stateError
)

// tft_op_take returns the result of an operation that has ended. If the operation is still running, it
// returns statePending, and event is set when the operation ends; the caller must not free event before that,
// or before tft_op_cancel has returned. The caller frees text.
//
//export tft_op_take
func tft_op_take(
	op C.int64_t, event *C.tft_event, number *C.int64_t, text **C.char, length *C.int64_t,
) (state C.int) {
	value, done, err := ops.Take(int64(op), func() { C.tft_event_set(event) })
	if !done {
		return statePending
	}
	state, *number, *text, *length = toC(value, err)
	return state
}

// toC converts a result to the values from which csrc/wait.c creates a Python object.
func toC(value any, err error) (state C.int, number C.int64_t, text *C.char, length C.int64_t) {
	if err != nil {
		return stateError, 0, C.CString(err.Error()), 0
	}
	switch v := value.(type) {
	case nil:
		return stateNone, 0, nil, 0
	case int64:
		return stateInt, C.int64_t(v), nil, 0
	case bool:
		if v {
			number = 1
		}
		return stateBool, number, nil, 0
	case string:
		return stateText, 0, C.CString(v), C.int64_t(len(v))
	default: // a server or a client: Go keeps it, and Python gets a handle
		return stateInt, C.int64_t(ops.Put(v)), nil, 0
	}
}

// tft_op_cancel cancels an operation, and does not wait for its end. From then on the operation does not set
// its event.
//
//export tft_op_cancel
func tft_op_cancel(op C.int64_t) { ops.Cancel(int64(op)) }
