package heal

import (
	"os"
	"syscall"
	"unsafe"
)

const (
	madvPopulateWrite = 23 // since Linux 5.14; not in package syscall
	populateAbove     = 64 << 10
)

// populate gets the pages behind b at once, if they were never touched. The kernel would otherwise be interrupted for
// each of them while it copies from the network, which costs half as much again as the copy. Where this is not known, or
// there is no memory, the copy says so.
func populate(b []byte) {
	if len(b) < populateAbove {
		return
	}
	page := uintptr(os.Getpagesize())
	begin := uintptr(unsafe.Pointer(&b[0]))
	end := (begin + uintptr(len(b))) &^ (page - 1) // only whole pages: the rest may belong to somebody else
	skip := (page - begin%page) % page
	if begin+skip < end && !touched(b[skip:end-begin]) {
		_ = syscall.Madvise(b[skip:end-begin], madvPopulateWrite)
	}
}

// touched says whether the last page of b is there; to ask for all of them again costs a tenth of the copy.
func touched(b []byte) bool {
	page := os.Getpagesize()
	var there byte
	last := &b[(len(b)-1)/page*page]
	_, _, errno := syscall.Syscall(syscall.SYS_MINCORE, uintptr(unsafe.Pointer(last)), 1, uintptr(unsafe.Pointer(&there)))
	return errno == 0 && there&1 == 1
}
