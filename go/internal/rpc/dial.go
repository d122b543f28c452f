package rpc

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/auth"
)

// Dialing has the settings of a client's connections.
type Dialing struct {
	Network  Network       // TCP if nil
	Security auth.Security // the client's own files
	Job      string        // its id; TORCHFT_JOB_ID of the environment if empty
	Run      string        // the id of this start of the job, from its launcher; empty: it has none
}

// LogLongWait logs in two seconds that a connection is waited for, unless the returned function is called
// before. reason is called then, on another goroutine.
func LogLongWait(what, address string, timeout time.Duration, reason func() string) (stop func()) {
	waiting := time.AfterFunc(2*time.Second, func() {
		slog.Default().Warn("torchft: waiting for the "+what, "address", address, "timeout", timeout,
			"reason", reason())
	})
	return func() { waiting.Stop() }
}

// Dial connects to a server of kind what ("lighthouse", "manager"), and returns when it is connected. It
// retries until connectTimeout is over; the error then names the address and the timeout. A wait that takes
// long is logged. If the connection breaks later, gRPC reconnects it.
func Dial(
	ctx context.Context, with Dialing, what, address string, connectTimeout time.Duration,
) (*grpc.ClientConn, error) {
	if connectTimeout <= 0 {
		return nil, status.Errorf(codes.InvalidArgument, "connect_timeout is %s: it must be more than 0",
			connectTimeout)
	}
	conn, lastErr, err := prepare(with, what, address)
	if err != nil {
		return nil, err
	}
	reason := func() string {
		if err := lastErr.Load(); err != nil {
			return (*err).Error()
		}
		return "it accepts connections, but does not answer as a gRPC server: its process may be stopped, " +
			"or be another program"
	}
	defer LogLongWait(what, address, connectTimeout, reason)()
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		conn.Connect()
		if conn.WaitForStateChange(ctx, state) {
			continue
		}
		_ = conn.Close()
		if errors.Is(ctx.Err(), context.Canceled) {
			return nil, status.Errorf(codes.Canceled, "connecting to %s at %s was cancelled", what, address)
		}
		return nil, status.Errorf(codes.Unavailable, "could not connect to %s at %s: timed out after %s: %s",
			what, address, connectTimeout, reason())
	}
	return conn, nil
}

// DialLater is like Dial, but connects only when the connection is first used.
func DialLater(with Dialing, what, address string) (*grpc.ClientConn, error) {
	conn, _, err := prepare(with, what, address)
	return conn, err
}

// prepare returns a connection that is not established yet, and a record of why connecting failed last.
func prepare(with Dialing, what, address string) (*grpc.ClientConn, *atomic.Pointer[error], error) {
	addr, err := ParseAddress(what+" address", address)
	if err != nil {
		return nil, nil, status.Error(codes.InvalidArgument, err.Error())
	}
	network, security := cmp.Or(with.Network, TCP), with.Security
	protected, err := security.Open(slog.Default())
	if err != nil {
		return nil, nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if security.TLSCA != "" && !addr.TLS {
		return nil, nil, status.Errorf(codes.InvalidArgument,
			"%s address is %q: with tls_ca (%s) it must begin with https://", what, address, auth.TLSCAEnv)
	}
	lastErr := &atomic.Pointer[error]{}
	dialer := func(ctx context.Context, hostPort string) (net.Conn, error) {
		conn, err := network.Dial(ctx, hostPort)
		if err != nil && !errors.Is(err, context.Canceled) {
			lastErr.Store(&err)
		}
		return conn, err
	}
	creds := handshakes{why: lastErr}
	if addr.TLS {
		creds.config = protected.Client
	}
	options := append(clientLimits(), grpc.WithTransportCredentials(creds), grpc.WithContextDialer(dialer))
	if protected.Tokens != nil {
		options = append(options, grpc.WithPerRPCCredentials(auth.Credentials{Tokens: protected.Tokens}))
	}
	// The passthrough resolver leaves the name to the dialer, so that each attempt resolves it again: the
	// host's address may have changed.
	conn, err := grpc.NewClient("passthrough:///"+addr.HostPort, options...)
	if err != nil {
		return nil, nil, status.Errorf(codes.InvalidArgument, "%s address is %q: %v", what, address, err)
	}
	return conn, lastErr, nil
}

// WithDefaultDeadline sets the deadline of a call without one to MaxWait from now.
func WithDefaultDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, MaxWait)
}

// Microseconds converts a number from the wire. It bounds the result where a time.Duration would overflow.
func Microseconds(us int64) time.Duration {
	const most = int64(math.MaxInt64 / time.Microsecond)
	return time.Duration(max(-most, min(us, most))) * time.Microsecond
}

// Sooner returns a time before a caller's deadline: earlier by the given time or by a twentieth of the
// remaining time, whichever is less. An answer at the deadline itself would be too late: the caller's own
// timer ends the call first.
func Sooner(deadline time.Time, most time.Duration) time.Time {
	return deadline.Add(-max(0, min(most, time.Until(deadline)/20)))
}

// Backoff is how long to wait before each next attempt: the wait doubles from First to Most.
type Backoff struct {
	First time.Duration
	Most  time.Duration
}

// RetryBackoff is for calls to a lighthouse that cannot be reached: short enough that its restart costs a job
// less than a second, long enough that thousands of groups do not overload it.
var RetryBackoff = Backoff{First: 20 * time.Millisecond, Most: 500 * time.Millisecond}

// Wait returns the pause after the given number of failed attempts. spread, in [0, 1), shortens it by up to
// half, so that groups whose attempts failed at the same time do not retry at the same time.
func (b Backoff) Wait(failed int, spread float64) time.Duration {
	wait := b.First
	for i := 1; i < failed && wait < b.Most; i++ {
		wait *= 2
	}
	return time.Duration(float64(min(wait, b.Most)) * (1 - spread/2))
}
