package manager_test

import (
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/torchftpb"
)

// proxyTo starts a reverse proxy for gRPC on this host, and returns its address.
func proxyTo(t *testing.T, address string) string {
	t.Helper()
	target, err := url.Parse(address)
	require.NoError(t, err)
	plain := &http.Protocols{}
	plain.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: plain}
	proxy := &http.Server{
		Protocols:         plain,
		ReadHeaderTimeout: time.Minute,
		Handler: &httputil.ReverseProxy{Transport: transport, Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.SetXForwarded()
		}},
	}
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- proxy.Serve(lis) }()
	t.Cleanup(func() {
		require.NoError(t, proxy.Close())
		require.ErrorIs(t, <-served, http.ErrServerClosed)
		transport.CloseIdleConnections()
	})
	return "http://" + lis.Addr().String()
}

// If a proxy on the server's host forwards calls of other hosts, they reach the server over loopback. They
// need the token to end the process.
func TestAKillThroughAProxyOnThisHostNeedsTheToken(t *testing.T) {
	for _, tc := range []struct {
		name, configured, sent string
		direct                 bool
		want                   codes.Code
		wantError              string
	}{
		{name: "from this host", direct: true, want: codes.OK},
		{name: "through a proxy", want: codes.PermissionDenied, wantError: "it comes from another host"},
		{name: "through a proxy, without the token", configured: "secret", want: codes.Unauthenticated,
			wantError: "wants the job's token"},
		{name: "through a proxy, with the token", configured: "secret", sent: "secret", want: codes.OK},
	} {
		t.Run(tc.name, func(t *testing.T) {
			exited := make(chan int, 1)
			server, err := fttest.NewManager(t.Context(), manager.ServerConfig{
				ReplicaID: "a", Hostname: "127.0.0.1", Bind: "127.0.0.1:0", StoreAddr: "store:1",
				WorldSize:         1,
				HeartbeatInterval: time.Second, ConnectTimeout: time.Second, Logger: fttest.Quiet,
				Membership: tenGroups{},
				Security:   security(t, tc.configured), Exit: func(code int) { exited <- code },
			})
			require.NoError(t, err)
			defer server.Shutdown()
			address := server.Address()
			if !tc.direct {
				address = proxyTo(t, address)
			}
			conn, err := rpc.Dial(t.Context(), rpc.Dialing{Security: security(t, tc.sent)}, "manager",
				address, time.Minute)
			require.NoError(t, err)
			defer func() { require.NoError(t, conn.Close()) }()
			_, err = torchftpb.NewManagerServiceClient(conn).Kill(t.Context(),
				&torchftpb.KillRequest{Msg: "test"})
			require.Equal(t, tc.want, status.Code(err), "%v", err)
			if tc.want == codes.OK {
				assert.Equal(t, 1, <-exited)
			} else {
				assert.ErrorContains(t, err, tc.wantError)
				assert.Empty(t, exited)
			}
		})
	}
}
