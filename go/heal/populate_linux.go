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

// populate maps the pages of b with one system call if they were never accessed. Without populate, each page
// causes a fault while the kernel copies data from the network into it, and the copy takes 50 % longer.
// Errors are ignored: on an older kernel the pages are mapped by faults, and if there is no memory, the copy
// reports it.
func populate(b []byte) {
	if len(b) < populateAbove {
		return
	}
	page := uintptr(os.Getpagesize())
	begin := uintptr(unsafe.Pointer(&b[0]))
	// Whole pages only: pages at the ends may also hold other data.
	end := (begin + uintptr(len(b))) &^ (page - 1)
	skip := (page - begin%page) % page
	if begin+skip < end && !touched(b[skip:end-begin]) {
		_ = syscall.Madvise(b[skip:end-begin], madvPopulateWrite)
	}
}

// touched reports whether the last page of b is mapped, as a sample of all of its pages. For memory that is
// mapped already, populate would have no effect and take a tenth of the copy's time.
func touched(b []byte) bool {
	page := os.Getpagesize()
	var resident byte
	last := &b[(len(b)-1)/page*page]
	_, _, errno := syscall.Syscall(syscall.SYS_MINCORE, uintptr(unsafe.Pointer(last)), 1,
		uintptr(unsafe.Pointer(&resident)))
	return errno == 0 && resident&1 == 1
}
