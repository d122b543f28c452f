package rpc_test

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
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
	"github.com/torchft/torchft/go/torchftpb"
)

// heartbeats answers heartbeats, and panics at one whose replica_id is "panic".
type heartbeats struct {
	torchftpb.UnimplementedLighthouseServiceServer
}

func (heartbeats) Heartbeat(
	_ context.Context, req *torchftpb.LighthouseHeartbeatRequest,
) (*torchftpb.LighthouseHeartbeatResponse, error) {
	if req.GetReplicaId() == "panic" {
		panic("boom")
	}
	return &torchftpb.LighthouseHeartbeatResponse{}, nil
}

// open returns a gate without credentials or limits: it accepts every call.
func open(t *testing.T) *rpc.Gate {
	gate, err := rpc.NewGate(auth.Security{}, rpc.Limits{}, fttest.Quiet)
	require.NoError(t, err)
	return gate
}

// serve serves heartbeats and HTTP at "server:1". The HTTP handler writes the method of the request, and
// panics at /panic.
func serve(t *testing.T, network *fttest.Network) *rpc.Server {
	lis, err := network.Host("server").Listen(":1")
	require.NoError(t, err)
	gate := open(t)
	g := rpc.NewGRPC(gate, fttest.Quiet)
	torchftpb.RegisterLighthouseServiceServer(g, heartbeats{})
	s := rpc.Serve(lis, gate, g, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/panic" {
			panic("boom")
		}
		_, _ = io.WriteString(w, r.Method)
	}), fttest.Quiet)
	t.Cleanup(s.Stop)
	return s
}

func TestOnePortServesGRPCAndHTTP(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := fttest.NewNetwork()
		s := serve(t, network)
		conn, err := rpc.Dial(t.Context(), rpc.Dialing{Network: network.Host("client")}, "lighthouse",
			"http://server:1", time.Second)
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close()) }()
		stub := torchftpb.NewLighthouseServiceClient(conn)

		transport := &http.Transport{DialContext: func(ctx context.Context, _, addr string) (net.Conn,
			error) {
			return network.Host("client").Dial(ctx, addr)
		}}
		defer transport.CloseIdleConnections()
		web := &http.Client{Transport: transport}

		for range 2 {
			// in each round, a handler of each protocol panics: in the second one, the server must still
			// serve both
			for _, method := range []string{"POST", "PUT", "PATCH", "GET"} {
				// the splitter must tell PO, PU and PA from HTTP/2's preface, PRI
				req, err := http.NewRequest(method, "http://server:1/", nil)
				require.NoError(t, err)
				resp, err := web.Do(req)
				require.NoError(t, err)
				body, err := io.ReadAll(resp.Body)
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
				assert.Equal(t, method, string(body))
			}
			resp, err := web.Get("http://server:1/panic")
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			assert.Equal(t, http.StatusInternalServerError, resp.StatusCode)

			_, err = stub.Heartbeat(t.Context(), &torchftpb.LighthouseHeartbeatRequest{})
			require.NoError(t, err)
			_, err = stub.Heartbeat(t.Context(), &torchftpb.LighthouseHeartbeatRequest{ReplicaId: "panic"})
			assert.Equal(t, codes.Internal, status.Code(err))
		}
		s.Stop()
		_, err = network.Host("client").Dial(t.Context(), "server:1")
		assert.Error(t, err)
	})
}

func TestASilentConnectionIsClosedAndDelaysNoOther(t *testing.T) {
	for name, sent := range map[string]string{"nothing": "", "half a preface": "PRI * HT"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				network := fttest.NewNetwork()
				serve(t, network)
				silent, err := network.Host("x").Dial(t.Context(), "server:1")
				require.NoError(t, err)
				_, err = io.WriteString(silent, sent)
				require.NoError(t, err)
				conn, err := rpc.Dial(t.Context(), rpc.Dialing{Network: network.Host("client")}, "lighthouse",
					"http://server:1", time.Second)
				require.NoError(t, err)
				require.NoError(t, conn.Close())
				start := time.Now()
				_, err = silent.Read(make([]byte, 1))
				assert.Equal(t, io.EOF, err)
				assert.Equal(t, 5*time.Second, time.Since(start)) // sniffTimeout
			})
		})
	}
}

// Stop may be called before, while or after the goroutines that Serve starts begin to accept connections. In
// none of these cases is an error logged: the end of the listener is expected.
func TestAnImmediateStopLogsNothing(t *testing.T) {
	for name, handler := range map[string]http.Handler{"grpc": nil, "grpc and http": http.NotFoundHandler()} {
		t.Run(name, func(t *testing.T) {
			for range 300 {
				lis, err := net.Listen("tcp", "127.0.0.1:0")
				require.NoError(t, err)
				var log fttest.Log
				logger := slog.New(slog.NewTextHandler(&log, nil))
				rpc.Serve(lis, open(t), rpc.NewGRPC(open(t), logger), handler, logger).Stop()
				require.Empty(t, log.String())
			}
		})
	}
}

func TestAListenerThatBreaksIsLogged(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, lis.Close())
	var log fttest.Log
	logger := slog.New(slog.NewTextHandler(&log, nil))
	s := rpc.Serve(lis, open(t), rpc.NewGRPC(open(t), logger), nil, logger)
	defer s.Stop()
	require.Eventually(t, func() bool { return log.Count("the server stopped listening") == 1 }, time.Minute,
		time.Millisecond)
}

func TestStopClosesConnectionsThatHaveSentNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := fttest.NewNetwork()
		s := serve(t, network)
		_, err := network.Host("x").Dial(t.Context(), "server:1")
		require.NoError(t, err)
		synctest.Wait()
		start := time.Now()
		s.Stop()
		assert.Zero(t, time.Since(start))
	})
}
