// Package ops holds the objects that Python has handles to: servers, clients, and operations in progress.
//
// Only integers cross the language boundary. A handle is never reused, so a stale handle is an error and can
// never refer to another object.
package ops

import (
	"errors"
	"sync"
)

var table = struct {
	sync.RWMutex
	last    int64
	objects map[int64]any
}{objects: map[int64]any{}}

// ErrClosed is returned by every call on a released handle.
var ErrClosed = errors.New("this object is shut down")

// Put stores v until Remove, and returns its handle, which is above zero.
func Put(v any) int64 {
	table.Lock()
	defer table.Unlock()
	table.last++
	table.objects[table.last] = v
	return table.last
}

// Get returns the object behind a handle.
func Get[T any](handle int64) (T, error) {
	table.RLock()
	v := table.objects[handle]
	table.RUnlock()
	t, ok := v.(T)
	if !ok {
		return t, ErrClosed
	}
	return t, nil
}

// Remove removes a handle and returns its object, nil if it was removed already: of two callers that release
// the same handle, one gets the object.
func Remove(handle int64) any {
	table.Lock()
	defer table.Unlock()
	v := table.objects[handle]
	delete(table.objects, handle)
	return v
}

// Count returns the number of live handles; tests use it to find leaks.
func Count() int {
	table.RLock()
	defer table.RUnlock()
	return len(table.objects)
}
