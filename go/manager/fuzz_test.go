package manager_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/torchftpb"
)

// FuzzSession sends messages of any kind on a rank's stream.
func FuzzSession(f *testing.F) {
	for _, requests := range [][]*torchftpb.RankRequest{
		{{Call: 1, TimeoutUs: 1000, Request: &torchftpb.RankRequest_Quorum{Quorum: &torchftpb.ManagerQuorumRequest{GroupRank: -1, Step: -1}}}},
		{{Call: 1, TimeoutUs: -1 << 63, Request: &torchftpb.RankRequest_ShouldCommit{ShouldCommit: &torchftpb.ShouldCommitRequest{GroupRank: 9}}}},
		{{Call: 1, TimeoutUs: 1<<63 - 1, Request: &torchftpb.RankRequest_Quorum{}}, {Call: 1, Request: &torchftpb.RankRequest_GiveUp{GiveUp: true}}},
		{{}, {Call: 1, Request: &torchftpb.RankRequest_ShouldCommit{}}},
	} {
		var all []byte
		for _, r := range requests {
			encoded, err := proto.Marshal(r)
			require.NoError(f, err)
			all = protowire.AppendBytes(all, encoded)
		}
		f.Add(all)
	}
	network, log := fttest.NewNetwork(), &fttest.Log{}
	server, err := manager.NewServer(context.Background(), manager.ServerConfig{
		ReplicaID: "a", Hostname: "a", Bind: "[::]:1", WorldSize: 2, Network: network.Host("a"),
		HeartbeatInterval: time.Second, ConnectTimeout: time.Second, Logger: slog.New(slog.NewTextHandler(log, nil)),
		Membership: &fake{},
	})
	require.NoError(f, err)
	f.Cleanup(server.Shutdown)
	conn, err := rpc.Dial(context.Background(), network.Host("x"), "manager", server.Address(), 10*time.Second)
	require.NoError(f, err)
	f.Cleanup(func() { _ = conn.Close() })
	f.Fuzz(func(t *testing.T, all []byte) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, err := conn.NewStream(ctx, &torchftpb.RankService_ServiceDesc.Streams[0],
			torchftpb.RankService_Session_FullMethodName, grpc.ForceCodec(bytesCodec{}))
		require.NoError(t, err)
		defer time.AfterFunc(20*time.Millisecond, cancel).Stop()
		for len(all) > 0 {
			message, n := protowire.ConsumeBytes(all)
			if n < 0 {
				message, n = all, len(all)
			}
			all = all[n:]
			if stream.SendMsg(&message) != nil {
				break
			}
		}
		_ = stream.CloseSend()
		for err == nil {
			var answer []byte
			err = stream.RecvMsg(&answer)
		}
		require.Zero(t, log.Count("internal error"))
	})
}

// bytesCodec sends bytes as they are.
type bytesCodec struct{}

func (bytesCodec) Marshal(v any) ([]byte, error)      { return *v.(*[]byte), nil }
func (bytesCodec) Unmarshal(data []byte, v any) error { *v.(*[]byte) = data; return nil }
func (bytesCodec) Name() string                       { return "proto" }
