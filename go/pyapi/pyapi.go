// Package pyapi is the interface of the Go core for Python: package-level functions over int64, bool, string
// and float64, each returning (T, error). Structs, slices, callbacks and bare errors do not cross the
// boundary, because gopy's code for them leaks or crashes.
//
// No function blocks, because the caller holds Python's global interpreter lock. A function whose name ends
// in Start begins an operation and returns its number; csrc/wait.c waits for the result without the lock, and
// Ctrl-C ends the wait. Objects are integer handles (package ops), structured results are JSON. Durations are
// in microseconds, the resolution of timedelta.
package pyapi

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/torchft/torchft/go/heal"
	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/logging"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/pyapi/ops"
)

// bindTimeout bounds the start of a server. Only the lookup of a host name can take long.
const bindTimeout = time.Minute

// shutdownTimeout bounds ReleaseStart, since each operation needs a timeout. Servers and clients bound their
// own shutdown.
const shutdownTimeout = time.Minute

var (
	logLevel slog.LevelVar
	lines    = logging.To(os.Stderr)
)

func init() {
	logLevel.Set(slog.LevelWarn)
	slog.SetDefault(slog.New(slog.NewTextHandler(lines, &slog.HandlerOptions{Level: &logLevel})))
	logging.GRPC(lines)
	ops.Quiet()
	heal.Working = ops.Busy
}

func micros(us int64) time.Duration { return time.Duration(us) * time.Microsecond }

// with calls do with the object of a handle.
func with[T, R any](handle int64, do func(T) (R, error)) (result R, err error) {
	defer ops.Guard(&err)
	object, err := ops.Get[T](handle)
	if err != nil {
		return result, err
	}
	return do(object)
}

// start starts an operation on the object of a handle.
func start[T any](
	handle int64, timeout time.Duration, do func(context.Context, T) (any, error),
) (op int64, err error) {
	return with(handle, func(object T) (int64, error) {
		return ops.Start(timeout, func(ctx context.Context) (any, error) { return do(ctx, object) }), nil
	})
}

// Address returns the address of a handle's server.
func Address(handle int64) (address string, err error) {
	return with(handle, func(s interface{ Address() string }) (string, error) { return s.Address(), nil })
}

// ReleaseStart closes the object of a handle; the result is false if it was closed already.
func ReleaseStart(handle int64) (op int64, err error) {
	defer ops.Guard(&err)
	object := ops.Remove(handle)
	return ops.Start(shutdownTimeout, func(context.Context) (any, error) {
		ops.Close(object)
		lines.Flush(logging.LastLines) // the process may end after this call
		return object != nil, nil
	}), nil
}

// SetLogLevel sets the level of the core's log on standard error, and returns the previous level.
func SetLogLevel(level string) (previous string, err error) {
	defer ops.Guard(&err)
	previous = strings.ToLower(logLevel.Level().String())
	switch level {
	case "debug":
		logLevel.Set(slog.LevelDebug)
	case "info":
		logLevel.Set(slog.LevelInfo)
	case "warn", "warning":
		logLevel.Set(slog.LevelWarn)
	case "error":
		logLevel.Set(slog.LevelError)
	default:
		return "", ops.As(ops.Value, fmt.Errorf("log level: %q is not allowed; allowed: debug, info, warn, "+
			"error", level))
	}
	return previous, nil
}

// Handles returns the number of live handles, operations in progress included.
func Handles() (count int64, err error) {
	defer ops.Guard(&err)
	return int64(ops.Count()), nil
}

// settings are the settings of the environment, read by torchft/_security.py: Go's own copy of the
// environment is from the moment when this library was loaded.
type settings struct {
	auth.Security
	Job string `json:"job"`
	Run string `json:"run"`
}

// parseSecurity reads settings in JSON, and checks the files that they name.
func parseSecurity(text string) (settings, error) {
	var s settings
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return s, fmt.Errorf("security: %w", err)
	}
	if s.Run != "" {
		if err := rpc.ValidateJob(rpc.RunEnv, s.Run); err != nil {
			return s, ops.As(ops.Value, err)
		}
	}
	return s, ops.As(ops.Value, s.Validate())
}
