package rpc

import (
	"context"
	"log/slog"
	"net/http"
	"runtime/debug"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The core runs inside the user's Python process, where a panic must never end the training. So each
// goroutine that it starts recovers from panics.

// Go runs f on a goroutine of the wait group, and logs a panic of f.
func Go(group *sync.WaitGroup, log *slog.Logger, name string, f func()) {
	group.Add(1)
	go func() {
		defer group.Done()
		defer func() {
			if r := recover(); r != nil {
				log.Error("torchft: a background task stopped", "task", name, "panic", r,
					"stack", string(debug.Stack()))
			}
		}()
		f()
	}()
}

// AfterFunc is time.AfterFunc, but logs panics of f. The returned timer is stopped: Reset starts it.
func AfterFunc(log *slog.Logger, name string, f func()) *time.Timer {
	timer := time.AfterFunc(time.Hour, func() {
		var err error // Recovered has logged it
		defer Recovered(log, name, &err)
		f()
	})
	timer.Stop()
	return timer
}

// Recovered turns a panic into an error. Use it deferred, with the address of the named result.
func Recovered(log *slog.Logger, what string, err *error) {
	if r := recover(); r != nil {
		*err = panicked(log, what, r)
	}
}

func panicked(log *slog.Logger, what string, r any) error {
	log.Error("torchft: internal error", "in", what, "panic", r, "stack", string(debug.Stack()))
	return status.Errorf(codes.Internal, "internal error in %s: %v", what, r)
}

// Guarded calls use. If it panics, Guarded logs and returns the error, and passes it to broken before, which
// replaces what use has left in an unknown state.
func Guarded(log *slog.Logger, what string, use func(), broken func(error)) (err error) {
	sound := false
	defer func() {
		if !sound {
			broken(err)
		}
	}()
	defer Recovered(log, what, &err)
	use()
	sound = true
	return nil
}

func recoverUnary(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo,
		handler grpc.UnaryHandler) (resp any, err error) {
		defer Recovered(log, info.FullMethod, &err)
		return handler(ctx, req)
	}
}

func recoverStream(log *slog.Logger) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo,
		handler grpc.StreamHandler) (err error) {
		defer Recovered(log, info.FullMethod, &err)
		return handler(srv, stream)
	}
}

func recoverHTTP(log *slog.Logger, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			switch p := recover(); p { // as net/http compares it
			case nil:
			case http.ErrAbortHandler:
				// a reverse proxy ends so if its client or its server leaves; net/http closes the connection,
				// without a line
				panic(p)
			default:
				http.Error(w, panicked(log, r.URL.Path, p).Error(), http.StatusInternalServerError)
			}
		}()
		h.ServeHTTP(w, r)
	})
}
