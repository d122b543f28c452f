package rpc

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
)

// Dial connects to a server of kind what ("lighthouse", "manager") and returns once it is connected. It retries until
// connectTimeout is over; the error then names the address and the timeout. If the connection breaks later, gRPC reconnects it.
func (s Security) Dial(ctx context.Context, network Network, what, address string, connectTimeout time.Duration) (*grpc.ClientConn, error) {
	addr, err := ParseAddress(what+" address", address)
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if connectTimeout <= 0 {
		return nil, status.Errorf(codes.InvalidArgument, "connect_timeout is %s: it must be more than 0", connectTimeout)
	}
	if network == nil {
		network = TCP
	}
	protected, err := s.open(slog.Default())
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if s.TLSCA != "" && !addr.TLS {
		return nil, status.Errorf(codes.InvalidArgument, "%s address is %q: with tls_ca (%s) it must begin with https://", what, address, TLSCAEnv)
	}
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()

	var lastErr atomic.Pointer[error]
	dialer := func(ctx context.Context, hostPort string) (net.Conn, error) {
		conn, err := network.Dial(ctx, hostPort)
		if err != nil && !errors.Is(err, context.Canceled) {
			lastErr.Store(&err)
		}
		return conn, err
	}
	creds := handshakes{why: &lastErr}
	if addr.TLS {
		creds.config = protected.client
	}
	options := append(clientLimits(), grpc.WithTransportCredentials(creds), grpc.WithContextDialer(dialer))
	if protected.tokens != nil {
		options = append(options, grpc.WithPerRPCCredentials(token{protected.tokens}))
	}
	// The passthrough resolver leaves the name to the dialer, so that each attempt resolves it again: an address may have changed.
	conn, err := grpc.NewClient("passthrough:///"+addr.HostPort, options...)
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "%s address is %q: %v", what, address, err)
	}
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		conn.Connect()
		if conn.WaitForStateChange(ctx, state) {
			continue
		}
		_ = conn.Close()
		if errors.Is(ctx.Err(), context.Canceled) {
			return nil, status.Errorf(codes.Canceled, "connecting to %s at %s was cancelled", what, address)
		}
		why := "it does not answer as a gRPC server"
		if err := lastErr.Load(); err != nil {
			why = (*err).Error()
		}
		return nil, status.Errorf(codes.Unavailable, "could not connect to %s at %s: timed out after %s: %s", what, address, connectTimeout, why)
	}
	return conn, nil
}

// Dial is Security.Dial without TLS and tokens.
func Dial(ctx context.Context, network Network, what, address string, connectTimeout time.Duration) (*grpc.ClientConn, error) {
	return Security{}.Dial(ctx, network, what, address, connectTimeout)
}

// WithDefaultDeadline gives a call without a deadline one of MaxWait from now.
func WithDefaultDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, MaxWait)
}

// Sooner is a time before a caller's deadline, earlier by the given time or by a twentieth of the remaining time, whichever is
// less. A server that answers at the deadline itself answers too late: the caller's own timer ends the call first.
func Sooner(deadline time.Time, most time.Duration) time.Time {
	return deadline.Add(-max(0, min(most, time.Until(deadline)/20)))
}
