// Package main is the c-shared library that Python loads: the generated binding of pyapi (torchft_go.go
// and torchft_go.c, see python/binding/generate.py), these exports, and csrc/.
package main

/*
#include <stdint.h>
*/
import "C"

import (
	"time"

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

// tft_op_take waits up to slice_ms for an operation and hands its result over. Text is for the caller to free.
//
//export tft_op_take
func tft_op_take(op, sliceMs C.int64_t, number *C.int64_t, text **C.char, length *C.int64_t) (state C.int) {
	value, done, err := ops.Take(int64(op), time.Duration(sliceMs)*time.Millisecond)
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
