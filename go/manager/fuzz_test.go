package manager_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/torchftpb"
)

// fuzzed starts a manager server that runs until the fuzzing ends, and connects to it.
func fuzzed(f *testing.F) (*grpc.ClientConn, *fttest.Log) {
	network, log := fttest.NewNetwork(), &fttest.Log{}
	server, err := fttest.NewManager(context.Background(), manager.ServerConfig{
		ReplicaID: "a", Hostname: "a", Bind: "[::]:1", WorldSize: 2, Network: network.Host("a"),
		HeartbeatInterval: time.Second, ConnectTimeout: time.Second,
		Logger:     slog.New(slog.NewTextHandler(log, nil)),
		Membership: &fake{},
	})
	require.NoError(f, err)
	f.Cleanup(server.Shutdown)
	conn, err := rpc.Dial(context.Background(), rpc.Dialing{Network: network.Host("x")}, "manager",
		server.Address(), 10*time.Second)
	require.NoError(f, err)
	f.Cleanup(func() { _ = conn.Close() })
	return conn, log
}

// FuzzSession sends messages of any kind on a rank's stream.
func FuzzSession(f *testing.F) {
	conn, log := fuzzed(f)
	fttest.FuzzStream(f, conn, log, torchftpb.RankService_Session_FullMethodName, [][]*torchftpb.RankRequest{
		{{Call: 1, TimeoutUs: 1000,
			Request: &torchftpb.RankRequest_Quorum{Quorum: &fttest.Request{GroupRank: -1,
				Step: -1}}}},
		{{Call: 1, TimeoutUs: -1 << 63,
			Request: &torchftpb.RankRequest_ShouldCommit{
				ShouldCommit: &torchftpb.ShouldCommitRequest{GroupRank: 9},
			}}},
		{{Call: 1, TimeoutUs: 1<<63 - 1, Request: &torchftpb.RankRequest_Quorum{}},
			{Call: 1, Request: &torchftpb.RankRequest_Cancel{Cancel: true}}},
		{{}, {Call: 1, Request: &torchftpb.RankRequest_ShouldCommit{}}},
	})
}
