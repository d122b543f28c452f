// Package main is the c-shared library that Python loads: the generated binding of pyapi (torchft_go.go
// and torchft_go.c, see python/binding/generate.py), these exports, and csrc/.
package main

/*
#include <stdint.h>
#include "event.h"
*/
import "C"

import (
	"github.com/torchft/torchft/go/pyapi/ops"
)

// The states of an operation, as csrc/wait.c numbers them.
const (
	statePending = iota
	stateNone
	stateInt
	stateBool
	stateText
	stateError
)

// tft_op_take hands over the result of an operation that has ended. While it runs on, the state is pending, and
// event is set when it ends; event must live until then, or until the operation is cancelled. Text is for
// the caller to free.
//
//export tft_op_take
func tft_op_take(op C.int64_t, event *C.tft_event, number *C.int64_t, text **C.char, length *C.int64_t) (state C.int) {
	value, done, err := ops.Take(int64(op), func() { C.tft_event_set(event) })
	if !done {
		return statePending
	}
	if err != nil {
		*text = C.CString(err.Error())
		return stateError
	}
	switch v := value.(type) {
	case nil:
		return stateNone
	case int64:
		*number = C.int64_t(v)
		return stateInt
	case bool:
		if v {
			*number = 1
		}
		return stateBool
	case string:
		*text = C.CString(v)
		*length = C.int64_t(len(v))
		return stateText
	default: // something that lives on: Python gets a handle to it
		*number = C.int64_t(ops.Put(v))
		return stateInt
	}
}

//export tft_op_cancel
func tft_op_cancel(op C.int64_t) { ops.Cancel(int64(op)) }
