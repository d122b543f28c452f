package rpc

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"syscall"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/torchft/torchft/go/internal/auth"
)

// handshakes are the credentials of a client. Each handshake uses the certificates that the files contain at
// that time. The reason of a failed handshake is recorded, because gRPC does not report it.
type handshakes struct {
	config *auth.Watched[*tls.Config] // nil: no TLS
	why    *atomic.Pointer[error]
}

func (h handshakes) credentials() credentials.TransportCredentials {
	if h.config == nil {
		return insecure.NewCredentials()
	}
	return credentials.NewTLS(h.config.Get())
}

func (h handshakes) ClientHandshake(
	ctx context.Context, authority string, raw net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := h.credentials().ClientHandshake(ctx, authority, raw)
	if err != nil {
		h.note(err)
		return nil, nil, err
	}
	return &beginning{Conn: conn, h: h, attempt: ctx.Err}, info, nil
}

func (handshakes) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("TLS handshake as a server: these are credentials of a client")
}

func (h handshakes) Info() credentials.ProtocolInfo          { return h.credentials().Info() }
func (h handshakes) Clone() credentials.TransportCredentials { return h }
func (handshakes) OverrideServerName(string) error           { return nil }

// note records why a handshake, or the first read after it, has failed.
func (h handshakes) note(err error) {
	if errors.Is(err, context.Canceled) || errors.Is(err, net.ErrClosed) {
		return // no reason: this side ended the attempt
	}
	// Before a server closes a connection that it refuses, it sends an alert with the reason. If the alert is
	// lost, the error contains no reason (mute): then the reason of an earlier attempt is kept.
	mute := errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
	if before := h.why.Load(); mute && before != nil {
		if _, hasHint := errors.AsType[*hinted](*before); hasHint {
			return
		}
	}
	hint := "; does it speak TLS? If it does, its address must begin with https://"
	switch {
	case h.config == nil && mute: // as of a process that was ended while it hung
		hint = "; the connection ended before an answer: the server hung, or was ended, or it speaks TLS, " +
			"and its address must begin with https://"
	case h.config != nil:
		hint = ""
		if _, plain := errors.AsType[tls.RecordHeaderError](err); plain || errors.Is(err, io.EOF) {
			hint = "; does it speak no TLS? Then its address must begin with http://"
		}
	}
	err = &hinted{err, hint}
	h.why.Store(&err)
}

// hinted is an error with a hint, which is empty if the scheme of the address is not the likely cause.
type hinted struct {
	error
	hint string
}

func (h *hinted) Error() string { return h.error.Error() + h.hint }

// beginning is a connection whose first read is inspected, since a refusal may arrive after ClientHandshake
// has succeeded: a server that refuses the client's certificate sends an alert (in TLS 1.3, after the
// client's handshake), and a server that requires TLS answers a client without it by an alert, or closes the
// connection.
type beginning struct {
	net.Conn
	h    handshakes
	read bool // the first read is over; gRPC reads on one goroutine only, so there is no lock

	// Of the attempt to connect. After its deadline gRPC closes the connection, and the error of a read says
	// nothing about the server.
	attempt func() error
}

func (b *beginning) Read(p []byte) (int, error) {
	n, err := b.Conn.Read(p)
	if !b.read {
		b.read = true
		switch {
		case n == 0 && err != nil && b.attempt() == nil:
			b.h.note(err)
		case b.h.config == nil && bytes.HasPrefix(p[:n], []byte{21, 3}): // an alert of TLS
			b.h.note(errors.New("it answers with an alert of TLS"))
		}
	}
	return n, err
}
