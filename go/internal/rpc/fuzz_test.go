package rpc_test

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// Bytes from other processes must be refused or understood, and never end the process. `go test` runs the
// seeds; `go test ./internal/rpc -fuzz FuzzPort` continues with mutations of them.

// FuzzPort sends arbitrary bytes to the port that serves gRPC and HTTP.
func FuzzPort(f *testing.F) {
	var frames bytes.Buffer
	frames.WriteString(http2.ClientPreface)
	framer := http2.NewFramer(&frames, nil)
	require.NoError(f, framer.WriteSettings())
	f.Add(frames.Bytes())
	require.NoError(f, framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1,
		BlockFragment: []byte{0x82, 0x87}, EndHeaders: true}))
	f.Add(frames.Bytes())
	f.Add([]byte("GET /status HTTP/1.1\r\nHost: x\r\n\r\n"))
	f.Add([]byte("POST /replica/%zz/kill HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n"))
	f.Add([]byte("PRI * HTTP/2.0\r\n\r\nXX"))
	f.Add([]byte{0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3})
	f.Add([]byte{})

	network, log := fttest.NewNetwork(), &fttest.Log{}
	lis, err := network.Host("server").Listen(":1")
	require.NoError(f, err)
	logger := slog.New(slog.NewTextHandler(log, nil))
	gate, err := rpc.NewGate(auth.Security{TokenFile: fttest.File(f, "secret")}, rpc.Limits{}, logger)
	require.NoError(f, err)
	g := rpc.NewGRPC(gate, logger)
	torchftpb.RegisterLighthouseServiceServer(g, heartbeats{})
	server := rpc.Serve(lis, gate, g, http.NotFoundHandler(), logger)
	f.Cleanup(server.Stop)
	f.Fuzz(func(t *testing.T, sent []byte) {
		conn, err := network.Host("x").Dial(context.Background(), "server:1")
		require.NoError(t, err)
		_, err = conn.Write(sent)
		require.NoError(t, err)
		// This ends an incomplete request. Otherwise the server would wait for the rest until its deadline,
		// with each input.
		require.NoError(t, conn.(interface{ CloseWrite() error }).CloseWrite())
		_ = conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		_, _ = io.Copy(io.Discard, conn)
		require.NoError(t, conn.Close())
		logged := log.Drain()
		require.NotContains(t, logged, "panic")
		require.NotContains(t, logged, "level=ERROR")
	})
}

func FuzzAddress(f *testing.F) {
	for _, address := range []string{"http://a:1", "https://[::1]:65535/", "a:1", "http://", "http://u@a:1",
		"http://a:1?x", "http://a:99999", "://", "http://[::1", "\x00"} {
		f.Add(address)
	}
	f.Fuzz(func(t *testing.T, address string) {
		if a, err := rpc.ParseAddress("x", address); err == nil {
			require.NotEmpty(t, a.HostPort)
		}
		_ = rpc.ValidateBind("x", address)
		_ = rpc.ValidateHostname("x", address)
		_ = auth.IsLoopback(address)
		_ = auth.IsOwnHost(address, "a")
		if tokens, err := auth.ParseTokens([]byte(address)); err == nil {
			require.NotEmpty(t, tokens)
			require.Equal(t, auth.TokenOK, tokens.Check([]string{auth.Bearer(tokens[0])}))
		}
	})
}
