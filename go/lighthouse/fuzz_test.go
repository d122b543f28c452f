package lighthouse_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// start starts a lighthouse that runs until the fuzzing ends.
func start(f *testing.F, security auth.Security) (*fttest.Network, *lighthouse.Server, *fttest.Log) {
	network, log := fttest.NewNetwork(), &fttest.Log{}
	cfg := lighthouse.DefaultConfig()
	cfg.MinReplicas, cfg.Hostname, cfg.Network, cfg.Security = 1, "lighthouse", network.Host("lighthouse"),
		security
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	server, err := lighthouse.New(cfg)
	require.NoError(f, err)
	f.Cleanup(server.Shutdown)
	return network, server, log
}

// FuzzHTTP sends requests of any kind from another host, without the token: nothing changes, and nothing
// breaks.
func FuzzHTTP(f *testing.F) {
	f.Add("GET", "/", "lighthouse", "", "", "")
	f.Add("POST", "/replica/a/kill", "lighthouse", "Origin", "http://evil.example", "token=guess")
	f.Add("POST", "/replica/%2e%2e/kill", "evil.example", "Authorization", "Bearer guess", "")
	f.Add("POST", "//replica//a//kill", "127.0.0.1", "X-Forwarded-For", "127.0.0.1", "token=%zz")
	f.Add("POST", "/replica/a/kill?job=x", "[::1]", "Content-Type", "multipart/form-data", "--")
	f.Add("GET", "/api/v1/history?from=-1&to=zz", "x", "Accept", "text/event-stream", "")
	f.Add("DELETE", "/jobs", "x", "Content-Length", "-1", "")
	_, server, log := start(f, auth.Security{TokenFile: fttest.File(f, "secret")})
	handler := server.Handler()
	f.Fuzz(func(t *testing.T, method, target, host, header, value, body string) {
		u, err := url.ParseRequestURI(target)
		if err != nil || strings.ContainsAny(method, " \r\n") || method == "" {
			return // net/http refuses such a request before the handler runs
		}
		// the stream of events never ends by itself
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		r := (&http.Request{
			Method: method, URL: u, Host: host, RemoteAddr: "10.0.0.9:1", Header: http.Header{},
			RequestURI: target,
			Proto:      "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Body: io.NopCloser(strings.NewReader(body)),
			ContentLength: int64(len(body)),
		}).WithContext(ctx)
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set(header, value)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		if method == http.MethodPost {
			require.GreaterOrEqual(t, w.Code, 300, "%s %s", method, target)
		}
		require.NotEqual(t, http.StatusInternalServerError, w.Code)
		require.NotContains(t, log.Drain(), "ended a replica group")
	})
}

// FuzzMemberStream sends messages of any kind on a member's stream.
func FuzzMemberStream(f *testing.F) {
	greeting := &torchftpb.MemberMessage{
		Message: &torchftpb.MemberMessage_Greeting{Greeting: &torchftpb.Greeting{ReplicaId: "a"}},
	}
	network, _, log := start(f, auth.Security{})
	conn, err := rpc.Dial(context.Background(), rpc.Dialing{Network: network.Host("x")}, "lighthouse",
		"http://lighthouse:29510", 10*time.Second)
	require.NoError(f, err)
	f.Cleanup(func() { _ = conn.Close() })
	past, err := wire.PackPast(&quorum.Quorum{ID: 1 << 62})
	require.NoError(f, err)
	fttest.FuzzStream(f, conn, log, torchftpb.MemberService_Attend_FullMethodName,
		[][]*torchftpb.MemberMessage{
			{greeting},
			{greeting, {Message: &torchftpb.MemberMessage_Alive{Alive: true}},
				{Message: &torchftpb.MemberMessage_Withdraw{Withdraw: 1}}},
			{greeting, {Message: &torchftpb.MemberMessage_Ask{Ask: &torchftpb.Ask{
				Number: 1, TimeoutUs: 1, KnownQuorumId: -1,
				Member: &torchftpb.QuorumMember{ReplicaId: "a", Step: -1, WorldSize: 1 << 63},
			}}}},
			{greeting, {Message: &torchftpb.MemberMessage_Past{Past: past}}},
			{{}, greeting, greeting},
		})
}

// FuzzArgs parses arbitrary command lines: the result is the usage, an error with a message, or a valid
// configuration.
func FuzzArgs(f *testing.F) {
	for _, args := range [][]string{
		{"--min_replicas", "1"}, {"--help"}, {"--min-replicas=2", "--bind", "[::]:0", "--join_timeout_ms=-1"},
		{"--", "x"}, {"-"}, {"--=1"},
		{"--min_replicas=9999999999999999999"}, {"--token_file", "\x00", "--min_replicas=1"},
		{"--min_replicas=1", "--state_dir="}, {},
	} {
		f.Add(strings.Join(args, "\n"))
	}
	f.Fuzz(func(t *testing.T, line string) {
		cfg, err := lighthouse.ParseArgs(strings.Split(line, "\n"))
		if help := (*lighthouse.Help)(nil); errors.As(err, &help) {
			require.NotEmpty(t, help.Usage)
		} else if err != nil {
			require.NotEmpty(t, err.Error())
		} else {
			require.NoError(t, cfg.Validate())
			require.Positive(t, cfg.MinReplicas)
		}
	})
}
