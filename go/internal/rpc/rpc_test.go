package rpc_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/round"
)

func TestMain(m *testing.M) { testmain.Run(m) }

func TestParseAddress(t *testing.T) {
	for address, want := range map[string]rpc.Address{
		"http://localhost:29510":  {HostPort: "localhost:29510"},
		"http://localhost:29510/": {HostPort: "localhost:29510"},
		"https://[::1]:1":         {HostPort: "[::1]:1", TLS: true},
		"http://node_7.cluster:8": {HostPort: "node_7.cluster:8"},
	} {
		got, err := rpc.ParseAddress("x", address)
		require.NoError(t, err, address)
		assert.Equal(t, want, got)
	}
	for address, why := range map[string]string{
		"":                   "begin with http:// or https://",
		"localhost:29510":    "begin with http:// or https://",
		"127.0.0.1:29510":    "begin with http:// or https://",
		"[::1]:29510":        "begin with http:// or https://",
		"tcp://h:1":          "begin with http:// or https://",
		"http://":            "the host is missing",
		"http://:29510":      "the host is missing",
		"http://h":           "the port is missing",
		"http://h:0":         "the port is not between 1 and 65535",
		"http://h:70000":     "the port is not between 1 and 65535",
		"http://h:port":      "it is not a URL",
		"http://h:1/path":    "more than a host and a port",
		"http://user@h:1":    "more than a host and a port",
		"http://h:1?x=1":     "more than a host and a port",
		"http://h:1 http://": "it is not a URL",
	} {
		_, err := rpc.ParseAddress("lighthouse_addr", address)
		assert.ErrorContains(t, err, fmt.Sprintf("lighthouse_addr is %q: it must be http://host:port or "+
			"https://host:port", address))
		assert.ErrorContains(t, err, why)
	}
}

func TestAnnounce(t *testing.T) {
	bound := &net.TCPAddr{IP: net.IPv6zero, Port: 29510}
	assert.Equal(t, "http://node7:29510", rpc.Announce("node7", bound, auth.Security{}))
	assert.Equal(t, "http://[fe80::1]:29510", rpc.Announce("fe80::1", bound, auth.Security{}))
	assert.Equal(t, "http://[fe80::1]:29510", rpc.Announce("[fe80::1]", bound, auth.Security{}))
	assert.Equal(t, "https://node7:29510", rpc.Announce("node7", bound, auth.Security{TLSCert: "c"}))
}

func TestHostsAndBinds(t *testing.T) {
	for _, good := range []string{"node7", "node-7.example", "10.0.0.1", "::1", "[::1]"} {
		assert.NoError(t, rpc.ValidateHostname("hostname", good))
	}
	for _, bad := range []string{"", "http://h", "h:1", "a b", "h/x", "[h]"} {
		assert.ErrorContains(t, rpc.ValidateHostname("hostname", bad), fmt.Sprintf("hostname is %q", bad))
	}
	for _, good := range []string{"[::]:0", "0.0.0.0:29510", ":1", "localhost:65535"} {
		assert.NoError(t, rpc.ValidateBind("bind", good))
	}
	for _, bad := range []string{"", "29510", "[::]", "h:-1", "h:65536", "h:http"} {
		assert.ErrorContains(t, rpc.ValidateBind("bind", bad), fmt.Sprintf("bind is %q", bad))
	}
}

func TestBackoff(t *testing.T) {
	b := rpc.Backoff{First: 20 * time.Millisecond, Most: time.Second}
	for failed, wantMS := range map[int]int64{0: 20, 1: 20, 2: 40, 3: 80, 6: 640, 7: 1000, 1000: 1000} {
		assert.Equal(t, wantMS, b.Wait(failed, 0).Milliseconds(), "after %d", failed)
	}
	assert.Equal(t, 10*time.Millisecond, b.Wait(1, 1), "spread shortens by up to half")
}

func TestWaiters(t *testing.T) {
	var w rpc.Waiters[round.WaiterID, string]
	a, answerA := w.Add()
	b, answerB := w.Add()
	c, answerC := w.Add()
	assert.NotEqual(t, a, b)
	w.Answer(a, "first")
	w.Answer(a, "second") // dropped: the waiter has its answer
	w.Drop(b)
	w.Answer(b, "late")
	w.AnswerAll("all")
	w.Answer(c, "again")
	assert.Equal(t, "first", <-answerA)
	assert.Equal(t, "all", <-answerC)
	assert.Empty(t, answerB)
}

func TestDialNamesAddressAndTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := fttest.NewNetwork().Host("a")
		start := time.Now()
		_, err := rpc.Dial(t.Context(), rpc.Dialing{Network: host}, "lighthouse", "http://b:1", 2*time.Second)
		assert.EqualError(t, err, "rpc error: code = Unavailable desc = could not connect to lighthouse at "+
			"http://b:1: timed out after 2s: dial b:1: connection refused")
		assert.Equal(t, 2*time.Second, time.Since(start))
		assert.False(t, rpc.IsTimeout(err))

		_, err = rpc.Dial(t.Context(), rpc.Dialing{Network: host}, "lighthouse", "b:1", time.Second)
		assert.ErrorContains(t, err, `lighthouse address is "b:1": it must be http://host:port`)
		_, err = rpc.Dial(t.Context(), rpc.Dialing{Network: host}, "lighthouse", "http://b:1", 0)
		assert.ErrorContains(t, err, "connect_timeout is 0s: it must be more than 0")

		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		_, err = rpc.Dial(ctx, rpc.Dialing{Network: host}, "lighthouse", "http://b:1", time.Minute)
		assert.Equal(t, codes.Canceled, status.Code(err))
	})
}

func TestDialToAServerOfAnotherProtocol(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := fttest.NewNetwork()
		lis, err := network.Host("b").Listen(":1")
		require.NoError(t, err)
		defer func() { require.NoError(t, lis.Close()) }()
		go func() {
			for {
				conn, err := lis.Accept()
				if err != nil {
					return
				}
				_, _ = conn.Write([]byte("SSH-2.0-OpenSSH_9.9\r\n"))
				_ = conn.Close()
			}
		}()
		_, err = rpc.Dial(t.Context(), rpc.Dialing{Network: network.Host("a")}, "manager", "http://b:1",
			time.Second)
		assert.ErrorContains(t, err, "could not connect to manager at http://b:1: timed out after 1s: it "+
			"accepts connections, but does not answer as a gRPC server")
	})
}

func TestDialToAServerThatIsStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := fttest.NewNetwork()
		lis, err := network.Host("b").Listen(":1") // as the kernel does for a process that was stopped
		require.NoError(t, err)
		defer func() { require.NoError(t, lis.Close()) }()
		timeout := 30 * time.Second // gRPC ends an attempt after 20 s
		_, err = rpc.Dial(t.Context(), rpc.Dialing{Network: endsWithEOF{network.Host("a")}}, "lighthouse",
			"http://b:1", timeout)
		assert.ErrorContains(t, err,
			"it accepts connections, but does not answer as a gRPC server: its process may be stopped")
	})
}

func TestALongWaitForAServerIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log fttest.Log
		before := slog.Default()
		slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
		defer slog.SetDefault(before)
		host := fttest.NewNetwork().Host("a")
		_, err := rpc.Dial(t.Context(), rpc.Dialing{Network: host}, "lighthouse", "http://b:1",
			1900*time.Millisecond)
		require.Error(t, err)
		assert.Empty(t, log.String())
		_, err = rpc.Dial(t.Context(), rpc.Dialing{Network: host}, "lighthouse", "http://b:1", time.Minute)
		require.Error(t, err)
		assert.Equal(t, 1, log.Count("\n"), log.String())
		assert.Contains(t, log.String(),
			`level=WARN msg="torchft: waiting for the lighthouse" address=http://b:1 timeout=1m0s reason="dial b:1: connection refused"`)
	})
}

// endsWithEOF is a network whose connections, as those of TCP, give EOF to a reader that waits when they are
// closed.
type endsWithEOF struct{ rpc.Network }

func (e endsWithEOF) Dial(ctx context.Context, address string) (net.Conn, error) {
	conn, err := e.Network.Dial(ctx, address)
	return eofConn{conn}, err
}

type eofConn struct{ net.Conn }

func (c eofConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err != nil {
		err = io.EOF
	}
	return n, err
}

func TestTCP(t *testing.T) {
	lis, err := rpc.TCP.Listen("[::]:0") // without IPv6 this means 0.0.0.0
	require.NoError(t, err)
	_, port, err := net.SplitHostPort(lis.Addr().String())
	require.NoError(t, err)

	_, err = rpc.TCP.Listen("[::]:" + port)
	assert.ErrorIs(t, err, syscall.EADDRINUSE)
	assert.ErrorContains(t, err, "the port is in use")
	_, err = rpc.TCP.Listen("203.0.113.7:0")
	assert.ErrorContains(t, err, `bind is "203.0.113.7:0"`)

	conn, err := rpc.TCP.Dial(t.Context(), "127.0.0.1:"+port)
	require.NoError(t, err)
	there, err := lis.Accept()
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	_, err = there.Read(make([]byte, 1))
	assert.Error(t, err, "the end of a connection reaches the other side")
	require.NoError(t, there.Close())
	require.NoError(t, lis.Close())
	_, err = rpc.TCP.Dial(t.Context(), "127.0.0.1:"+port)
	assert.ErrorIs(t, err, syscall.ECONNREFUSED)
}

func TestGoSurvivesAPanic(t *testing.T) {
	log := &fttest.Log{}
	var group sync.WaitGroup
	rpc.Go(&group, slog.New(slog.NewTextHandler(log, nil)), "doomed", func() { panic("boom") })
	group.Wait()
	assert.Equal(t, 1, log.Count("doomed"))
	assert.Contains(t, log.String(), "boom")
}

func TestTheErrorOfNestedCallsHasTheCodeOnce(t *testing.T) {
	inner := rpc.Wrap("quorum", "lighthouse at http://l:1", status.Error(codes.DeadlineExceeded, "no "+
		"quorum in time"))
	assert.EqualError(t, inner,
		"quorum call to lighthouse at http://l:1 timed out: no quorum in time (DeadlineExceeded)")
	outer := rpc.Wrap("quorum", "manager at http://m:1", wire.ToStatus(wire.FromError(inner)))
	text := "quorum call to manager at http://m:1 timed out: quorum call to lighthouse at http://l:1 timed " +
		"out: no quorum in time (DeadlineExceeded)"
	assert.EqualError(t, outer, text)
	assert.Equal(t, codes.DeadlineExceeded, status.Code(outer))
	assert.True(t, rpc.IsTimeout(outer))
	assert.EqualError(t, rpc.Wrap("a", "b", rpc.Wrap("c", "d", errors.New("e"))),
		"a call to b failed: c call to d failed: e (Unknown)")
}

func TestMessageHasTheReasonOfAFailedConnection(t *testing.T) {
	for text, want := range map[string]string{
		`connection error: desc = "transport: Error while dialing: dial tcp 127.0.0.1:1: connect: connection refused"`: "dial tcp 127.0.0.1:1: connect: connection refused",
		`connection error: desc = "transport: authentication handshake failed: x509: for \"a\""`:                       `authentication handshake failed: x509: for "a"`,
		`connection error: desc = broken`: `connection error: desc = broken`,
		`"quoted"`:                        `"quoted"`,
	} {
		assert.Equal(t, want, rpc.Message(status.Error(codes.Unavailable, text)))
		assert.Equal(t, want, rpc.Message(errors.Join(status.Error(codes.Unavailable, text), nil)))
	}
}
