package ops

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
)

// Class determines which Python exception an error becomes. It is passed as a prefix of the message, because
// gopy passes only the text; csrc/errors.c removes it. With a refusal of the lighthouse it is "R=ended:", and
// the exception has the attribute refusal.
type Class string

const (
	Timeout Class = "T:" // TimeoutError
	Runtime Class = "R:" // RuntimeError
	Value   Class = "V:" // ValueError
)

type classed struct {
	class Class
	err   error
}

func (e *classed) Error() string {
	class := string(e.class)
	if refusal := wire.RefusalOf(e.err); refusal != "" {
		class = class[:1] + "=" + string(refusal) + ":"
	}
	return class + e.err.Error()
}
func (e *classed) Unwrap() error { return e.err }

// As returns err with a class, which replaces an earlier one. A nil error stays nil.
func As(class Class, err error) error {
	if err == nil {
		return nil
	}
	if c, ok := errors.AsType[*classed](err); ok {
		err = c.err
	}
	return &classed{class, err}
}

// CallFailed makes the error of a call a TimeoutError in Python if the call's own deadline has passed.
func CallFailed(err error) error {
	if rpc.IsTimeout(err) {
		return As(Timeout, err)
	}
	return err
}

// Guard is deferred by all functions that Python calls: a panic becomes an error; each has a class.
func Guard(err *error) {
	if p := recover(); p != nil {
		*err = panicked(p)
		return
	}
	if _, ok := errors.AsType[*classed](*err); *err != nil && !ok {
		*err = As(Runtime, *err)
	}
}

// panicked prints the stack to the log: the exception carries one line only.
func panicked(p any) error {
	slog.Error("panic in torchft's native library", "panic", p, "stack", string(debug.Stack()))
	return As(Runtime, fmt.Errorf("a bug in torchft's native library (panic): %v", p))
}
