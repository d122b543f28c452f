package main

/*
#include <stdint.h>
*/
import "C"

import (
	"slices"
	"unsafe"

	"github.com/torchft/torchft/go/heal"
	"github.com/torchft/torchft/go/pyapi/ops"
)

// tft_register_memory creates a heal.Memory from pairs of address and length, and returns its handle, or an
// error, which the caller frees.
//
//export tft_register_memory
func tft_register_memory(pairs *C.int64_t, count C.int64_t, failure **C.char) (handle C.int64_t) {
	register := func() (made int64, err error) {
		defer ops.Guard(&err)
		memory, err := heal.NewMemory(slices.Clone(unsafe.Slice((*int64)(unsafe.Pointer(pairs)), int(count))))
		if err != nil {
			return 0, ops.As(ops.Value, err)
		}
		return ops.Put(memory), nil
	}
	made, err := register()
	if err != nil {
		*failure = C.CString(err.Error())
	}
	return C.int64_t(made)
}
