package rpc

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"time"

	"github.com/torchft/torchft/go/internal/auth"
)

// HTTPTransport returns a transport for HTTP requests over a network, without a proxy. Each connection uses
// the certificates that the client's files contain at that time.
func HTTPTransport(network Network, client *auth.Watched[*tls.Config]) *http.Transport {
	dial := func(ctx context.Context, _, address string) (net.Conn, error) {
		return network.Dial(ctx, address)
	}
	return &http.Transport{
		DialContext:     dial,
		IdleConnTimeout: time.Minute,
		DialTLSContext: func(ctx context.Context, kind, address string) (net.Conn, error) {
			raw, err := dial(ctx, kind, address)
			if err != nil {
				return nil, err
			}
			config := client.Get().Clone()
			config.ServerName, _, _ = net.SplitHostPort(address)
			conn := tls.Client(raw, config)
			if err := conn.HandshakeContext(ctx); err != nil {
				_ = raw.Close()
				return nil, err
			}
			return conn, nil
		},
	}
}
