package rpc_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// serveSecurely serves gRPC and HTTP on one real port, and returns it.
func serveSecurely(t *testing.T, security auth.Security, limits rpc.Limits) (port string, log *fttest.Log) {
	t.Helper()
	log = &fttest.Log{}
	logger := slog.New(slog.NewTextHandler(log, nil))
	gate, err := rpc.NewGate(security, limits, logger)
	require.NoError(t, err)
	lis, err := rpc.TCP.Listen("127.0.0.1:0")
	require.NoError(t, err)
	g := rpc.NewGRPC(gate, logger)
	torchftpb.RegisterLighthouseServiceServer(g, heartbeats{})
	s := rpc.Serve(lis, gate, g, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_,
			_ = io.WriteString(w, "page")
	}), logger)
	t.Cleanup(s.Stop)
	_, port, err = net.SplitHostPort(lis.Addr().String())
	require.NoError(t, err)
	return port, log
}

// beat connects and makes one call. After a timeout without an answer it tries again with a longer one: on a
// busy machine a handshake may take a second.
func beat(t *testing.T, security auth.Security, address string, id string) error {
	t.Helper()
	for timeout := time.Second; ; timeout *= 4 {
		err := beatWithin(t, timeout, security, address, id)
		if err == nil || !strings.Contains(err.Error(), "does not answer as a gRPC server") ||
			timeout > 10*time.Second {
			return err
		}
	}
}

func beatWithin(
	t *testing.T, timeout time.Duration, security auth.Security, address string, id string,
) error {
	t.Helper()
	conn, err := rpc.Dial(t.Context(), rpc.Dialing{Security: security}, "lighthouse", address, timeout)
	if err != nil {
		return err
	}
	defer func() { require.NoError(t, conn.Close()) }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err = torchftpb.NewLighthouseServiceClient(conn).Heartbeat(ctx,
		&torchftpb.LighthouseHeartbeatRequest{ReplicaId: id})
	return err
}

func TestWhichCallsAreAccepted(t *testing.T) {
	ca, otherCA := fttest.NewCA(t), fttest.NewCA(t)
	cert, key := ca.Issue("127.0.0.1", "localhost")
	ofOtherCA, keyOfOtherCA := otherCA.Issue("127.0.0.1")
	expired, keyOfExpired := ca.IssueExpired("127.0.0.1")
	elsewhere, keyOfElsewhere := ca.Issue("elsewhere.example")
	token, other := fttest.File(t, "secret\n"), fttest.File(t, "guess")
	both := fttest.File(t, "new\nsecret")

	tls := auth.Security{TLSCert: cert, TLSKey: key}
	mutual := auth.Security{TLSCert: cert, TLSKey: key, TLSClientCA: ca.File}
	all := auth.Security{TLSCert: cert, TLSKey: key, TLSClientCA: ca.File, TLSCA: ca.File, TokenFile: token}
	for _, tc := range []struct {
		name           string
		server, client auth.Security
		scheme         string
		want           codes.Code
		wantError      string
	}{
		{name: "open", scheme: "http"},
		{name: "a token that is not required", client: auth.Security{TokenFile: token}, scheme: "http"},
		{name: "the token", server: auth.Security{TokenFile: token}, client: auth.Security{TokenFile: token},
			scheme: "http"},
		{name: "a token that is being replaced", server: auth.Security{TokenFile: both},
			client: auth.Security{TokenFile: token}, scheme: "http"},
		{name: "no token", server: auth.Security{TokenFile: token}, scheme: "http",
			want: codes.Unauthenticated, wantError: "wants the job's token: set TORCHFT_TOKEN_FILE"},
		{name: "wrong token", server: auth.Security{TokenFile: token},
			client: auth.Security{TokenFile: other}, scheme: "http", want: codes.Unauthenticated,
			wantError: "the token is not the job's"},
		{name: "a later token", server: auth.Security{TokenFile: token},
			client: auth.Security{TokenFile: both}, scheme: "http", want: codes.Unauthenticated,
			wantError: "the token is not the job's"},
		{name: "tls", server: tls, client: auth.Security{TLSCA: ca.File}, scheme: "https"},
		{name: "both certificates", server: mutual, client: withCA(mutual, ca.File), scheme: "https"},
		{name: "everything", server: all, client: all, scheme: "https"},
		{name: "everything but the token", server: all, client: withCA(mutual, ca.File), scheme: "https",
			want: codes.Unauthenticated, wantError: "wants the job's token"},
		{name: "the server's authority is unknown", server: tls, client: auth.Security{TLSCA: otherCA.File},
			scheme: "https", want: codes.Unavailable, wantError: "certificate signed by unknown authority"},
		{name: "the server's authority is unknown, and the client names no private one", server: tls,
			scheme: "https", want: codes.Unavailable, wantError: "certificate signed by unknown authority"},
		{name: "the server's certificate has expired",
			server: auth.Security{TLSCert: expired, TLSKey: keyOfExpired},
			client: auth.Security{TLSCA: ca.File}, scheme: "https", want: codes.Unavailable,
			wantError: "certificate has expired"},
		{name: "the server's certificate is another host's",
			server: auth.Security{TLSCert: elsewhere, TLSKey: keyOfElsewhere},
			client: auth.Security{TLSCA: ca.File}, scheme: "https", want: codes.Unavailable,
			wantError: "127.0.0.1"},
		{name: "no certificate", server: mutual, client: auth.Security{TLSCA: ca.File}, scheme: "https",
			want: codes.Unavailable, wantError: "certificate required"},
		{name: "a certificate of another authority", server: mutual,
			client: auth.Security{TLSCA: ca.File, TLSCert: ofOtherCA, TLSKey: keyOfOtherCA}, scheme: "https",
			want: codes.Unavailable, wantError: "tls: "},
		{name: "an expired certificate", server: mutual,
			client: auth.Security{TLSCA: ca.File, TLSCert: expired, TLSKey: keyOfExpired}, scheme: "https",
			want: codes.Unavailable, wantError: "expired"},
		{name: "plain to tls", server: tls, scheme: "http", want: codes.Unavailable,
			wantError: "its address must begin with https://"},
		{name: "tls to plain", client: auth.Security{TLSCA: ca.File}, scheme: "https",
			want: codes.Unavailable, wantError: "does it speak no TLS? Then its address must begin with " +
				"http://"},
		{name: "plain, although the client has tls_ca", client: auth.Security{TLSCA: ca.File}, scheme: "http",
			want:      codes.InvalidArgument,
			wantError: "with tls_ca (TORCHFT_TLS_CA) it must begin with https://"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			port, log := serveSecurely(t, tc.server, rpc.Limits{})
			err := beat(t, tc.client, tc.scheme+"://127.0.0.1:"+port, "a")
			require.Equal(t, tc.want, status.Code(err), "%v", err)
			if tc.want != codes.OK {
				assert.ErrorContains(t, err, tc.wantError)
			}
			if tc.want == codes.Unauthenticated {
				assert.Equal(t, 1, log.Count("a call was refused"))
			}
		})
	}
}

// A server that hangs has a kernel that connects; when the server is killed, so are its connections.
func TestAConnectionThatEndsBeforeAnAnswerIsNoSignOfTLS(t *testing.T) {
	lis, err := rpc.TCP.Listen("127.0.0.1:0")
	require.NoError(t, err)
	go func() {
		for {
			conn, err := lis.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	}()
	defer func() { require.NoError(t, lis.Close()) }()
	err = beatWithin(t, 2*time.Second, auth.Security{}, "http://"+lis.Addr().String(), "a")
	require.ErrorContains(t, err, "the connection ended before an answer: the server hung, or was ended")
	require.NotContains(t, err.Error(), "does it speak TLS?")
}

func TestHTTPOverTLS(t *testing.T) {
	ca := fttest.NewCA(t)
	cert, key := ca.Issue("127.0.0.1")
	port, log := serveSecurely(t, auth.Security{TLSCert: cert, TLSKey: key}, rpc.Limits{})

	// Like a browser, which could use HTTP/2: on this port HTTP/2 is used for gRPC only.
	transport := &http.Transport{TLSClientConfig: fttest.Trusting(t, ca.File), ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport, Timeout: 10 * time.Second}).Get("https://127.0.0.1:" +
		port + "/")
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, "page", string(body))
	assert.Equal(t, "HTTP/1.1", resp.Proto)

	plain := &http.Transport{}
	defer plain.CloseIdleConnections()
	resp, err = (&http.Client{Transport: plain, Timeout: 10 * time.Second}).Get("http://127.0.0.1:" + port +
		"/")
	require.NoError(t, err)
	body, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, http.StatusBadRequest, resp.StatusCode)
	assert.Contains(t, string(body), "use https://")
	assert.Equal(t, 1, log.Count("a connection was refused"))
}

// All files are read again when they change. An invalid file has no effect.
func TestFilesAreReadAgain(t *testing.T) {
	ca := fttest.NewCA(t)
	cert, key := ca.Issue("127.0.0.1")
	token := fttest.File(t, "first")
	client := auth.Security{TokenFile: fttest.File(t, "second"), TLSCA: ca.File}
	port, log := serveSecurely(t, auth.Security{TokenFile: token, TLSCert: cert, TLSKey: key}, rpc.Limits{})
	address := "https://127.0.0.1:" + port
	require.Equal(t, codes.Unauthenticated, status.Code(beat(t, client, address, "a")))

	replace(t, token, "second, and more\n")
	require.Eventually(t, func() bool {
		_ = beat(t, client, address, "a")
		return log.Count("their last valid content stays in use") > 0
	}, time.Minute, 50*time.Millisecond)
	require.Equal(t, codes.Unauthenticated, status.Code(beat(t, client, address, "a")))

	replace(t, token, "second\n")
	require.Eventually(t, func() bool { return beat(t, client, address, "a") == nil }, time.Minute,
		50*time.Millisecond)

	expired, keyOfExpired := ca.IssueExpired("127.0.0.1")
	replace(t, cert, read(t, expired))
	replace(t, key, read(t, keyOfExpired))
	require.Eventually(t, func() bool {
		err := beat(t, client, address, "a")
		return err != nil && strings.Contains(err.Error(), "expired")
	}, time.Minute, 50*time.Millisecond)
}

// replace replaces a file atomically: it writes another one, and renames it.
func replace(t *testing.T, path, content string) {
	require.NoError(t, os.WriteFile(path+".new", []byte(content), 0o600))
	require.NoError(t, os.Rename(path+".new", path))
}

func read(t *testing.T, path string) string {
	content, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(content)
}

func TestJoinsOfOneAddress(t *testing.T) {
	port, _ := serveSecurely(t, auth.Security{}, rpc.Limits{
		MaxJoins: 1,
		IsJoin: func(method string) bool {
			return method == torchftpb.LighthouseService_Quorum_FullMethodName
		},
	})
	conn, err := rpc.Dial(t.Context(), rpc.Dialing{}, "lighthouse", "http://127.0.0.1:"+port, 20*time.Second)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close()) }()
	stub := torchftpb.NewLighthouseServiceClient(conn)
	var mu sync.Mutex
	got := map[codes.Code]int{}
	require.Eventually(t, func() bool {
		// repeated, since the limit is per second, and a second may end between two calls
		_, err := stub.Quorum(t.Context(), &torchftpb.LighthouseQuorumRequest{})
		mu.Lock()
		defer mu.Unlock()
		got[status.Code(err)]++
		if status.Code(err) == codes.Unavailable {
			assert.ErrorContains(t, err,
				"too many joins: 1 in one second from 127.0.0.1 (max_joins_per_second)")
		}
		return got[codes.Unavailable] > 0 && got[codes.Unimplemented] > 1
	}, time.Minute, time.Millisecond, "refused, and then accepted again")
	_, err = stub.Heartbeat(t.Context(), &torchftpb.LighthouseHeartbeatRequest{})
	assert.NoError(t, err, "a heartbeat is no join, and is not limited")
}

// A client that is refused retries, for hours if nobody looks.
func TestTheSameRefusalIsLoggedOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &fttest.Log{}
		gate, err := rpc.NewGate(auth.Security{}, rpc.Limits{MaxJoins: 1},
			slog.New(slog.NewTextHandler(log, nil)))
		require.NoError(t, err)
		from := func(ip string) context.Context {
			return peer.NewContext(t.Context(), &peer.Peer{Addr: &net.TCPAddr{IP: net.ParseIP(ip), Port: 1}})
		}
		for second := range 125 {
			for range 2 {
				_ = gate.Join(from("10.0.0.1"))
			}
			if second == 100 {
				time.Sleep(time.Second)
				_, _ = gate.Join(from("10.0.0.2")), gate.Join(from("10.0.0.2"))
			}
			time.Sleep(time.Second)
		}
		assert.Equal(t, 3, log.Count("from=10.0.0.1 "))
		assert.Equal(t, 1, log.Count("from=10.0.0.2 "))
	})
}

func TestConnectionsAreLimited(t *testing.T) {
	port, log := serveSecurely(t, auth.Security{}, rpc.Limits{MaxConnections: 2})
	address := "http://127.0.0.1:" + port
	var open []*grpc.ClientConn
	for range 2 {
		conn, err := rpc.Dial(t.Context(), rpc.Dialing{}, "lighthouse", address, 5*time.Second)
		require.NoError(t, err)
		_, err = torchftpb.NewLighthouseServiceClient(conn).Heartbeat(t.Context(),
			&torchftpb.LighthouseHeartbeatRequest{})
		require.NoError(t, err)
		open = append(open, conn)
	}
	assert.Error(t, beatWithin(t, time.Second, auth.Security{}, address, "a"))
	assert.Positive(t, log.Count("max_connections"))
	require.NoError(t, open[0].Close())
	require.Eventually(t, func() bool { return beat(t, auth.Security{}, address, "a") == nil }, time.Minute,
		10*time.Millisecond)
	require.NoError(t, open[1].Close())
}

// The unauthorized connections are silent, use HTTP, do not complete the handshake, or lack a certificate or
// the token.
func TestUnauthorizedConnectionsTakeNoPlaceOfAMember(t *testing.T) {
	ca := fttest.NewCA(t)
	cert, key := ca.Issue("127.0.0.1")
	token := auth.Security{TokenFile: fttest.File(t, "secret")}
	secured := auth.Security{TLSCert: cert, TLSKey: key, TLSCA: ca.File}
	all := secured
	all.TokenFile, all.TLSClientCA = token.TokenFile, ca.File
	for name, tc := range map[string]struct{ members, others auth.Security }{
		"open":          {},
		"token":         {members: token},
		"TLS":           {members: secured},
		"TLS and token": {members: all, others: secured},
		"TLS without certificate": {members: all,
			others: auth.Security{TokenFile: token.TokenFile, TLSCA: ca.File}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			security := tc.members
			// One connection for the member, one for each beat, and two in case the server has not noticed
			// the end of earlier ones.
			port, log := serveSecurely(t, security, rpc.Limits{MaxConnections: 4})
			address := "http://127.0.0.1:" + port
			if security.TLSCert != "" {
				address = "https://127.0.0.1:" + port
			}
			dialed := &dials{Network: rpc.TCP}
			member, err := rpc.Dial(t.Context(), rpc.Dialing{Security: security, Network: dialed},
				"lighthouse", address, 10*time.Second)
			require.NoError(t, err)
			defer func() { require.NoError(t, member.Close()) }()
			for i := range 15 {
				_, err := torchftpb.NewLighthouseServiceClient(member).Heartbeat(t.Context(),
					&torchftpb.LighthouseHeartbeatRequest{ReplicaId: "b"})
				require.NoError(t, err)
				conn, err := net.Dial("tcp", "127.0.0.1:"+port)
				require.NoError(t, err)
				defer func() { require.NoError(t, conn.Close()) }()
				switch {
				case i%3 == 0:
					_, _ = conn.Write([]byte("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"))
				case i%3 == 1 && security.TLSCert != "":
					shakeHands(t, ca, conn)
				}
				if security.TokenFile != "" {
					require.Error(t, beatWithin(t, 100*time.Millisecond, tc.others, address, "a"))
				}
				require.NoError(t, beat(t, security, address, "a"))
			}
			assert.Zero(t, log.Count("max_connections"))
			assert.EqualValues(t, 1, dialed.n.Load(), "the connected member stays")
		})
	}
}

// dials is a network that counts the connections it makes.
type dials struct {
	rpc.Network
	n atomic.Int64
}

func (d *dials) Dial(ctx context.Context, address string) (net.Conn, error) {
	d.n.Add(1)
	return d.Network.Dial(ctx, address)
}

// shakeHands makes a TLS handshake, in which the server may require a certificate, and sends nothing after
// it.
func shakeHands(t *testing.T, ca *fttest.CA, conn net.Conn) {
	config := fttest.Trusting(t, ca.File)
	config.ServerName = "127.0.0.1"
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	_ = tls.Client(conn, config).HandshakeContext(t.Context())
}

func TestRequestsAreLimited(t *testing.T) {
	port, _ := serveSecurely(t, auth.Security{}, rpc.Limits{})
	address := "http://127.0.0.1:" + port
	assert.NoError(t, beat(t, auth.Security{}, address, strings.Repeat("x", 4<<20-16)))
	err := beat(t, auth.Security{}, address, strings.Repeat("x", 4<<20))
	assert.Equal(t, codes.ResourceExhausted, status.Code(err))
	assert.ErrorContains(t, err, fmt.Sprint(4<<20))
	assert.NoError(t, beat(t, auth.Security{}, address, "a"), "the server is alive")

	// A header that is too large ends only its own connection.
	raw, err := net.Dial("tcp", "127.0.0.1:"+port)
	require.NoError(t, err)
	defer func() { require.NoError(t, raw.Close()) }()
	require.NoError(t, raw.SetDeadline(time.Now().Add(10*time.Second)))
	_, err = fmt.Fprintf(raw, "GET / HTTP/1.1\r\nHost: x\r\nX: %s\r\n\r\n", strings.Repeat("x", 128<<10))
	if err == nil {
		answer, err := io.ReadAll(raw)
		if err == nil || len(answer) > 0 {
			assert.Contains(t, string(answer), "431")
		}
	}
	assert.NotErrorIs(t, err, os.ErrDeadlineExceeded)
}

func withCA(s auth.Security, file string) auth.Security {
	s.TLSCA = file
	return s
}
